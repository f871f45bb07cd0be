"""Compare the time of `mtp-gguf list-tensors` and gguf-dump on a file with a real vocabulary.

    python benchmarks/listing.py --trials 5

The file has the header of an untied 0.8B model at Q4_K_M: 248,320 tokens, as many merges and token
types, and the tensors of 24 layers and a head. Its 0.7 GB of data are sparse (a hole in the file),
since neither program reads them. Both run as separate processes, including interpreter start; the
first run of each is not counted. Prints one JSON object; the ratio holds on other machines too,
the seconds only on this one.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from mtp_gguf.gguf_tools.files.format import TensorSpec, Value, ValueType, lay_out
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME, F16, F32, TensorType

TOKENS = 248_320
WIDTH, HIDDEN, LAYERS = 1024, 3584, 24
Q4_K, Q6_K = BY_NAME["Q4_K"], BY_NAME["Q6_K"]
OURS = "import sys; from mtp_gguf.cli import main; sys.argv[0] = 'mtp-gguf'; main()"
DUMP = "from gguf.scripts.gguf_dump import main; main()"


def main() -> None:
    """Measure both programs and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=5, help="timed runs of each [5]")
    parser.add_argument("--work", type=Path, help="folder for the file [a temporary one]")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        path = Path(folder) / "model.gguf"
        header = write_model(path)
        ours = [seconds(OURS, "list-tensors", path) for _ in range(arguments.trials + 1)][1:]
        dump = [seconds(DUMP, path) for _ in range(arguments.trials + 1)][1:]
        start = [seconds("pass") for _ in range(arguments.trials + 1)][1:]
        result = {
            "file_bytes": path.stat().st_size,
            "header_bytes": header,
            "tokens": TOKENS,
            "trials": arguments.trials,
            "list_tensors_seconds": summary(ours),
            "gguf_dump_seconds": summary(dump),
            "interpreter_start_seconds": summary(start),
            "ratio": round(statistics.median(dump) / statistics.median(ours), 1),
            "machine": f"{platform.machine()}, {platform.system()}",
            "python": platform.python_version(),
            "gguf": version("gguf"),
        }
    print(json.dumps(result, indent=1))


def seconds(code: str, *arguments: object) -> float:
    """Return the wall time of a Python process that runs `code`."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def summary(times: list[float]) -> dict[str, float]:
    """Return the median and minimum of some times."""
    return {"median": round(statistics.median(times), 3), "least": round(min(times), 3)}


def write_model(path: Path) -> int:
    """Write the file and return the length of its header."""
    metadata = {
        "general.architecture": Value(ValueType.STRING, "qwen35"),
        "qwen35.block_count": Value(ValueType.U32, LAYERS + 1),
        "qwen35.nextn_predict_layers": Value(ValueType.U32, 1),
        "tokenizer.ggml.tokens": Value(ValueType.STRING, [f"Ġt{i:x}" for i in range(TOKENS)]),
        "tokenizer.ggml.token_type": Value(ValueType.I32, [1] * TOKENS),
        "tokenizer.ggml.merges": Value(ValueType.STRING, [f"Ġt {i:x}" for i in range(TOKENS)]),
    }
    layout = lay_out(metadata, model_tensors())
    with path.open("wb") as out:
        out.write(layout.header)
        out.truncate(layout.size)
    return len(layout.header)


def model_tensors() -> list[TensorSpec]:
    """Return tensors of the number and sizes of a 0.8B model."""
    tensors = [
        TensorSpec("token_embd.weight", (WIDTH, TOKENS), Q6_K),
        TensorSpec("output.weight", (WIDTH, TOKENS), Q6_K),
        TensorSpec("output_norm.weight", (WIDTH,), F32),
    ]
    for layer in range(LAYERS):
        tensors += block(layer, Q4_K)
    head = LAYERS
    tensors.append(TensorSpec(f"blk.{head}.nextn.eh_proj.weight", (2 * WIDTH, WIDTH), F16))
    tensors += [
        TensorSpec(f"blk.{head}.nextn.{name}.weight", (WIDTH,), F32)
        for name in ("enorm", "hnorm", "shared_head_norm")
    ]
    return tensors + block(head, F16)


def block(layer: int, kind: TensorType) -> list[TensorSpec]:
    """Return the tensors of a full-attention block; linear attention has about as many."""
    matrices = {
        "attn_q": (WIDTH, 4 * WIDTH),
        "attn_k": (WIDTH, WIDTH // 2),
        "attn_v": (WIDTH, WIDTH // 2),
        "attn_output": (2 * WIDTH, WIDTH),
        "ffn_gate": (WIDTH, HIDDEN),
        "ffn_up": (WIDTH, HIDDEN),
        "ffn_down": (HIDDEN, WIDTH),
    }
    norms = {
        "attn_norm": WIDTH,
        "post_attention_norm": WIDTH,
        "attn_q_norm": WIDTH // 4,
        "attn_k_norm": WIDTH // 4,
    }
    return [TensorSpec(f"blk.{layer}.{n}.weight", (w,), F32) for n, w in norms.items()] + [
        TensorSpec(f"blk.{layer}.{n}.weight", s, kind) for n, s in matrices.items()
    ]


if __name__ == "__main__":
    main()
