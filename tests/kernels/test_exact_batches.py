"""exact=True needs no options if our kernels compute all of a trunk's products."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.files.format import TensorSpec, Value, ValueType, lay_out
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.native.libraries.exact import LANES_ROWS, MAX_ROWS
from mtp_gguf.native.runtime import VARIABLE
from support.llama_libraries import CHOICE

ASK = """
import json, sys
from pathlib import Path
from mtp_gguf.native.libraries.exact import exact_batches, has_product_kernels
options = json.loads(sys.argv[2])
found = exact_batches(Path(sys.argv[1]), options, two_phase=False)
print(json.dumps([has_product_kernels(), found.min_rows, found.max_rows, options.get("type_k")]))
"""


def trunk(path: Path, *types: str) -> Path:
    """A file of one matrix of each type; no more than what is looked at."""
    keys = {
        "general.architecture": Value(ValueType.STRING, "qwen35"),
        "qwen35.block_count": Value(ValueType.U32, len(types)),
    }
    matrices = [
        TensorSpec(f"blk.{i}.ffn_up.weight", (256, 2), BY_NAME[name])
        for i, name in enumerate(types)
    ]
    layout = lay_out(keys, matrices)
    path.write_bytes(layout.header.ljust(layout.size, b"\0"))
    return path


@pytest.mark.parametrize(
    ("types", "lanes", "options", "expected"),
    [
        (["Q4_K", "Q6_K", "F16", "Q8_0"], "", {}, (1, LANES_ROWS)),
        (["Q4_0", "Q3_K", "MXFP4", "IQ2_XS"], "", {}, (1, LANES_ROWS)),
        (["NVFP4", "Q2_0"], "", {}, (1, LANES_ROWS)),
        (["Q4_K", "TQ1_0"], "", {}, (1, MAX_ROWS)),
        (["Q4_K", "Q8_0"], "0", {}, (2, MAX_ROWS)),
        (["Q4_K"], "", {"lora_path": "adapter.gguf"}, (2, MAX_ROWS)),
    ],
)
def test_batches_of_exact(
    tmp_path: Path,
    libraries: Path,
    has_kernels: bool,
    types: list[str],
    lanes: str,
    options: dict[str, str],
    expected: tuple[int, int],
) -> None:
    path = trunk(tmp_path / "trunk.gguf", *types)
    environment = {k: v for k, v in os.environ.items() if k != CHOICE}
    environment[VARIABLE] = str(libraries)
    if lanes:
        environment[CHOICE] = lanes
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(path), json.dumps(options)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    if not has_kernels and not lanes:
        pytest.skip("this CPU has no AVX2")
    assert tuple(found[1:3]) == expected
    assert found[0] == (lanes != "0")
