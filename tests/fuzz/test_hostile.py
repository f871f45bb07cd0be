"""No GGUF file kills the process that loads it: it is refused by name before llama.cpp sees it.

`FAULTS` has the shortest mutation of each kind of death that the sweep found. The sweep itself:

    MTP_FUZZ_FILES=100000 pytest -m slow tests/fuzz/test_hostile.py -k sweep
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fuzz.native_corpus import DENSE, MOE

from mtp_gguf.gguf_tools.files.format import ValueType
from mtp_gguf.native import MTPLlama
from mtp_gguf.native.checks.trial import try_model
from mtp_gguf.native.errors import ModelRefusedError
from support.commands import invoke
from support.gguf_mutations import (
    AddTensor,
    Content,
    CutArray,
    DropKey,
    DropTensor,
    FitTensors,
    Mutation,
    Retype,
    SetArray,
    SetElement,
    SetKey,
    mutated,
    read_content,
)
from support.models import Models

U32, I32, F32, STRING = ValueType.U32, ValueType.I32, ValueType.F32, ValueType.STRING
TOKENS = "tokenizer.ggml.tokens"
EVERY_DAY = 60
SWEEP = int(os.environ.get("MTP_FUZZ_FILES", "20000"))


@dataclass(frozen=True)
class Fault:
    """Mutations on which llama.cpp ends the process, and the words that refuse them now."""

    mutations: Sequence[Mutation]
    says: str
    model: str = "dense"


def dense(name: str, value: Any, says: str, *more: Mutation, kind: ValueType = U32) -> Fault:
    """A faulty key of the dense model, and what is expected of it."""
    return Fault([SetKey(f"qwen35.{name}", kind, value), *more], f"{name}: expected {says}")


def moe(name: str, value: int, says: str) -> Fault:
    return Fault([SetKey(f"qwen35moe.{name}", U32, value)], f"{name}: expected {says}", "moe")


FIT = FitTensors()
SECTIONS = "qwen35.rope.dimension_sections"
MODEL = "tokenizer.ggml.model"
FAULTS = {
    "too many layers": dense("block_count", 1025, "1 to 512"),
    "more heads than layers": dense("nextn_predict_layers", 31, ""),
    "experts used and none there": dense("expert_used_count", 2, "0"),
    "more experts used than there are": moe("expert_used_count", 32, "1 to 4"),
    "no expert used": moe("expert_used_count", 0, "1"),
    "too many experts": moe("expert_count", 2000, "1 to"),
    "more groups than experts": moe("expert_group_count", 4, "0 to 3"),
    "experts without a width": Fault(
        [DropKey("qwen35moe.expert_feed_forward_length"), FIT], "expected dimensions from 1", "moe"
    ),
    "a shared expert without a width": Fault(
        [SetKey("qwen35moe.expert_shared_feed_forward_length", U32, 0), FIT],
        "expected dimensions from 1",
        "moe",
    ),
    "an unknown way to scale positions": dense(
        "rope.scaling.type", "dynamic", "one of", kind=STRING
    ),
    "keys wider than values": Fault(
        [SetKey("qwen35.attention.key_length", U32, 256), FIT],
        "value_length: expected the key length, 256",
    ),
    "heads that cannot be shared": dense("attention.head_count_kv", 3, "a divisor of 2", FIT),
    "an odd rotation": dense("rope.dimension_count", 3, "an even number"),
    "sections wider than a head": Fault([SetKey(SECTIONS, I32, 20)], "dimension_sections"),
    "sections of nothing": Fault(
        [SetArray(SECTIONS, I32, (0, 0, 0, 0))],
        "dimension_sections: expected numbers from 0 that add up to 1 to 64",
    ),
    "a negative epsilon": dense("attention.layer_norm_rms_epsilon", -1.0, "0 or more", kind=F32),
    "key heads that cannot be spread": dense("ssm.group_count", 12, "a divisor of 1", FIT),
    "an inner size of its own": dense("ssm.inner_size", 4, "32 × 1, found 4"),
    "one layer in no layers": dense(
        "full_attention_interval", 0, "1 to", DropKey("qwen35.attention.recurrent_layers")
    ),
    "a norm in 16 bits": Fault(
        [Retype("blk.0.attn_norm.weight", "BF16")], "attn_norm.weight: expected F32, found BF16"
    ),
    "a matrix of integers": Fault(
        [Retype("blk.1.attn_k.weight", "I8")], "attn_k.weight: expected a type of weights"
    ),
    "an embedding of integers": Fault(
        [Retype("token_embd.weight", "I32")], "token_embd.weight: expected a type of weights"
    ),
    "a gate that is not there": Fault(
        [DropTensor("blk.0.attn_gate.weight")], "blk.0.attn_gate.weight: expected this tensor"
    ),
    "a token twice": Fault([SetElement(TOKENS, 1, "!")], "expected each token once, found '!'"),
    "a token twice for C": Fault(
        [SetElement(TOKENS, 1, "!\0x")], "expected each token once, found '!'"
    ),
    "no room for BOS": Fault(
        [CutArray(TOKENS, 8), SetKey("tokenizer.ggml.add_bos_token", ValueType.BOOL, 1), FIT],
        "tokens: expected 12 tokens or more, found 8",
    ),
    "no vocabulary": Fault(
        [SetKey(MODEL, STRING, "no_vocab"), SetKey("qwen35.vocab_size", U32, 1024)],
        f"{MODEL}: expected 'gpt2'",
    ),
    "a vocabulary of another kind": Fault(
        [SetKey(MODEL, STRING, "llama")], f"{MODEL}: expected 'gpt2'"
    ),
}
# Refused where they once were another crash: a read past the hidden states that drafting asks for,
# a traceback, a loop of 2^32 rounds.
OTHERS = {
    "an output width of its own": dense("embedding_length_out", 65, "32"),
    "a context past what is counted": dense("context_length", 2**31, "1 to 2147483647"),
    "a template that is none": Fault(
        [SetKey("tokenizer.chat_template", STRING, "{%")], "chat_template: expected a Jinja"
    ),
    "layers without end": dense("nextn_predict_layers", 2**32 - 1, ""),
}


@pytest.fixture(scope="module")
def contents(models: Models) -> dict[str, Content]:
    specs = {"dense": DENSE, "moe": MOE}
    return {name: read_content(models.gguf(spec)) for name, spec in specs.items()}


def write(folder: Path, fault: Fault, contents: dict[str, Content]) -> Path:
    path = folder / "hostile.gguf"
    path.write_bytes(mutated(contents[fault.model], fault.mutations))
    return path


@pytest.mark.parametrize("fault", [*FAULTS.values(), *OTHERS.values()], ids=[*FAULTS, *OTHERS])
def test_crash_is_refused(fault: Fault, contents: dict[str, Content], tmp_path: Path) -> None:
    path = write(tmp_path, fault, contents)
    result = invoke("generate", path, "-p", "a", "-n", "2", "--depth", "0")
    assert result.exit_code == 1
    assert fault.says in result.stderr
    assert result.stderr.count("\n") == 1
    with pytest.raises(ModelRefusedError):
        MTPLlama(str(path), depth=2)
    if "template" not in fault.says:  # a program, which doctor runs with --load alone
        result = invoke("doctor", path)
        assert result.exit_code == 1, result.output
        assert "cannot draft" in result.output


@pytest.mark.parametrize("options", [("--no-draft",), ()])
def test_serve_refuses_before_it_starts_a_server(
    options: tuple[str, ...], contents: dict[str, Content], tmp_path: Path
) -> None:
    fault = FAULTS["sections of nothing"]
    result = invoke("serve", write(tmp_path, fault, contents), *options)
    assert result.exit_code == 1
    assert fault.says in result.stderr
    assert "llama-server would crash on it" in result.stderr


def test_empty_tensors_of_a_head_file(contents: dict[str, Content], tmp_path: Path) -> None:
    """ggml aborts on them; this file is read by libmtp alone."""
    sound = write(tmp_path, Fault([], "", "moe"), contents).rename(tmp_path / "sound.gguf")
    path = write(tmp_path, FAULTS["a shared expert without a width"], contents)
    with pytest.raises(ModelRefusedError, match=r"shexp\.weight: expected dimensions from 1"):
        MTPLlama(str(sound), depth=2, mtp_head=str(path), n_ctx=64)


LOAD = """
import sys, itertools, llama_cpp
llm = llama_cpp.Llama(sys.argv[1], n_ctx=64, n_threads=1, n_threads_batch=1, verbose=True)
print(list(itertools.islice(llm.generate(llm.tokenize(b"a b"), temp=0), 3)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_llama_cpp_still_crashes(
    fault: Fault, contents: dict[str, Content], tmp_path: Path
) -> None:
    """Each rule is needed: without it the process ends. Where one is not any more, remove it.

    pytest -m slow tests/fuzz/test_hostile.py -k still_crashes
    """
    path = write(tmp_path, fault, contents)
    done = subprocess.run([sys.executable, "-c", LOAD, path], capture_output=True, check=False)
    assert done.returncode < 0


@pytest.mark.thorough
def test_load_tries_the_model(
    contents: dict[str, Content], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = write(tmp_path, Fault([], ""), contents)
    assert try_model(sound) is None
    result = invoke("doctor", sound, "--load")
    assert result.exit_code == 0
    assert "loaded: it runs and drafts" in result.output

    template = write(tmp_path, OTHERS["a template that is none"], contents)
    assert invoke("doctor", template).exit_code == 0
    result = invoke("doctor", template, "--load", "--json")
    assert result.exit_code == 1
    (finding,) = json.loads(result.stdout)["findings"]
    assert finding["code"] == "does-not-run"
    assert "tokenizer.chat_template: expected a Jinja template" in finding["text"]

    # A crash that no check foresees: the child has none of the checks.
    (tmp_path / "sitecustomize.py").write_text(
        "import mtp_gguf.gguf_tools.files.loadable as loadable\n"
        "loadable.load_faults = lambda _: []\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    crashing = write(tmp_path, FAULTS["too many layers"], contents)
    said = try_model(crashing)
    assert said is not None
    assert "it crashes the process that loads it (SIGABRT)" in said
    assert "GGML_ASSERT(hparams.n_layer_all > 0" in said


def test_load_is_for_gguf_files(tmp_path: Path) -> None:
    for place in (tmp_path, "owner/name"):
        result = invoke("doctor", place, "--load")
        assert result.exit_code == 2
        assert "--load and --explain are for GGUF files" in result.stderr


def test_damaged_head_file(contents: dict[str, Content], tmp_path: Path) -> None:
    """A token type for a token that is not there, and a d2t of another type: no traceback."""
    path = write(tmp_path, Fault([CutArray(TOKENS, 512), FIT], ""), contents)
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("a b c")
    words = ("fastmtp", "add", path, "--corpus", corpus, "-o", tmp_path / "out.gguf")
    assert invoke(*words).exit_code in (0, 1)
    assert not isinstance(invoke(*words).exception, IndexError)
    some = SetArray("mtp_gguf.fastmtp.token_ids", U32, (1, 2, 3))
    faults: list[list[Mutation]] = [
        [AddTensor("d2t", (1025,), "I32")],
        [AddTensor("d2t", (0,), "I64"), some],
    ]
    for mutations in faults:
        path = write(tmp_path, Fault(mutations, ""), contents)
        result = invoke("convert", path, "-o", tmp_path / "out.gguf", "--quant", "Q8_0")
        assert result.exit_code == 1
        assert "d2t: expected" in result.stderr


def sweep(files: int, first: int, folder: Path) -> dict[str, Any]:
    """The report of hostile.py, which forks: in a process of its own."""
    report = folder / "report.json"
    words = ["--files", str(files), "--first", str(first), "--report", str(report)]
    script = Path(__file__).with_name("hostile.py")
    subprocess.run([sys.executable, script, *words], check=True, capture_output=True)
    found: dict[str, Any] = json.loads(report.read_text())
    return found


@pytest.mark.thorough
def test_a_few_files(tmp_path: Path) -> None:
    found = sweep(EVERY_DAY, 0, tmp_path)
    assert found["faults"] == []
    assert found["files"] == EVERY_DAY
    assert set(found["outcomes"]["generate"]) == {"accepted", "refused"}


@pytest.mark.slow
def test_sweep(tmp_path: Path) -> None:
    assert sweep(SWEEP, 10_000_000, tmp_path)["faults"] == []
