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

U32, F32, STRING = ValueType.U32, ValueType.F32, ValueType.STRING
TOKENS = "tokenizer.ggml.tokens"
EVERY_DAY = 60
SWEEP = int(os.environ.get("MTP_FUZZ_FILES", "20000"))


@dataclass(frozen=True)
class Fault:
    """Mutations on which llama.cpp ends the process, and the words that refuse them now."""

    mutations: Sequence[Mutation]
    says: str
    model: str = "dense"


def key(name: str, value: Any, kind: ValueType = U32) -> SetKey:
    return SetKey(f"qwen35.{name}", kind, value)


def moe(name: str, value: Any) -> SetKey:
    return SetKey(f"qwen35moe.{name}", U32, value)


FIT = FitTensors()
FAULTS = {
    "too many layers": Fault([key("block_count", 1025)], "block_count: expected 1 to 512"),
    "more heads than layers": Fault(
        [key("nextn_predict_layers", 31)], "nextn_predict_layers: expected"
    ),
    "experts used and none there": Fault(
        [key("expert_used_count", 2)], "expert_used_count: expected 0"
    ),
    "more experts used than there are": Fault(
        [moe("expert_used_count", 32)], "expert_used_count: expected 1 to 4", "moe"
    ),
    "no expert used": Fault([moe("expert_used_count", 0)], "expert_used_count: expected 1", "moe"),
    "too many experts": Fault([moe("expert_count", 2000)], "expert_count: expected 1 to", "moe"),
    "more groups than experts": Fault(
        [moe("expert_group_count", 4)], "expert_group_count: expected 0 to 3", "moe"
    ),
    "experts without a width": Fault(
        [DropKey("qwen35moe.expert_feed_forward_length"), FIT], "expected dimensions from 1", "moe"
    ),
    "a shared expert without a width": Fault(
        [moe("expert_shared_feed_forward_length", 0), FIT], "expected dimensions from 1", "moe"
    ),
    "an unknown way to scale positions": Fault(
        [key("rope.scaling.type", "dynamic", STRING)], "rope.scaling.type: expected one of"
    ),
    "keys wider than values": Fault(
        [key("attention.key_length", 256), FIT], "value_length: expected the key length, 256"
    ),
    "heads that cannot be shared": Fault(
        [key("attention.head_count_kv", 3), FIT], "head_count_kv: expected a divisor of 2"
    ),
    "an odd rotation": Fault(
        [key("rope.dimension_count", 3)], "rope.dimension_count: expected an even number"
    ),
    "sections wider than a head": Fault(
        [SetKey("qwen35.rope.dimension_sections", ValueType.I32, 20)], "dimension_sections"
    ),
    "sections of nothing": Fault(
        [SetArray("qwen35.rope.dimension_sections", ValueType.I32, (0, 0, 0, 0))],
        "dimension_sections: expected numbers from 0 that add up to 1 to 64",
    ),
    "a negative epsilon": Fault(
        [key("attention.layer_norm_rms_epsilon", -1.0, F32)], "rms_epsilon: expected 0 or more"
    ),
    "key heads that cannot be spread": Fault(
        [key("ssm.group_count", 12), FIT], "ssm.group_count: expected a divisor of 1"
    ),
    "an inner size of its own": Fault(
        [key("ssm.inner_size", 4)], "ssm.inner_size: expected 32 × 1, found 4"
    ),
    "one layer in no layers": Fault(
        [key("full_attention_interval", 0), DropKey("qwen35.attention.recurrent_layers")],
        "full_attention_interval: expected 1 to",
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
        [
            CutArray(TOKENS, 8),
            SetKey("tokenizer.ggml.add_bos_token", ValueType.BOOL, 1),
            FIT,
        ],
        "tokens: expected 12 tokens or more, found 8",
    ),
    "no vocabulary": Fault(
        [SetKey("tokenizer.ggml.model", STRING, "no_vocab"), key("vocab_size", 1024)],
        "tokenizer.ggml.model: expected 'gpt2'",
    ),
    "a vocabulary of another kind": Fault(
        [SetKey("tokenizer.ggml.model", STRING, "llama")], "tokenizer.ggml.model: expected 'gpt2'"
    ),
}
# Refused where they once were another crash: a read past the hidden states that drafting asks for,
# a traceback, a loop of 2^32 rounds.
OTHERS = {
    "an output width of its own": Fault(
        [key("embedding_length_out", 65)], "embedding_length_out: expected 32"
    ),
    "a context past what is counted": Fault(
        [key("context_length", 2**31)], "context_length: expected 1 to 2147483647"
    ),
    "a template that is none": Fault(
        [SetKey("tokenizer.chat_template", STRING, "{%")], "chat_template: expected a Jinja"
    ),
    "layers without end": Fault(
        [key("nextn_predict_layers", 2**32 - 1)], "nextn_predict_layers: expected"
    ),
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
