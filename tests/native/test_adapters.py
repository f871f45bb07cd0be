"""LoRA adapters: drafting with one, and files that are none."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gguf import GGUFWriter

from mtp_gguf.gguf_tools.files.format import Value, ValueType, open_gguf
from mtp_gguf.native import ModelRefusedError
from support.generation import load, plain, take

if TYPE_CHECKING:
    from support.gguf_files import Rewrite
    from support.models import Dial

ABOUT = {"general.type": "adapter", "general.architecture": "qwen35", "adapter.type": "lora"}


def adapter(
    path: Path,
    model: Path,
    *,
    keys: dict[str, str] | None = None,
    tensor: str = "blk.0.ffn_down.weight",
    width: int = 0,
) -> Path:
    """Write an adapter of rank 2 for one matrix of a model, `width` columns too wide."""
    keys = ABOUT | (keys or {})
    with open_gguf(model) as file:
        shape = next(t.shape for t in file.tensors if t.name == "blk.0.ffn_down.weight")
    chance = np.random.default_rng(3)
    writer = GGUFWriter(path, keys.pop("general.architecture"))
    for key, value in keys.items():
        writer.add_string(key, value)
    writer.add_float32("adapter.lora.alpha", 8.0)
    for part, rows, columns in (("a", 2, shape[0] + width), ("b", shape[1], 2)):
        values = chance.normal(size=(rows, columns)).astype(np.float32)
        writer.add_tensor(f"{tensor}.lora_{part}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_text_is_that_of_llama_cpp_with_the_adapter(dial: Dial, tmp_path: Path) -> None:
    model = dial("tiny")
    lora = str(adapter(tmp_path / "lora.gguf", model))
    with (
        load(model, depth=2, lora_path=lora) as ours,
        load(model, depth=2) as other,
        plain(model, lora_path=lora) as theirs,
    ):
        assert ours.depth == 2
        text, without, want = (take(llm, 24, [3, 1, 4, 1, 5]) for llm in (ours, other, theirs))
    assert text == want != without


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"keys": {"general.architecture": "llama"}}, "general.architecture: expected qwen35 .*"),
        ({"keys": {"adapter.type": "control"}}, "adapter.type: expected lora .*found control"),
        ({"tensor": "blk.9.ffn_down.weight"}, r"(?s)llama.cpp refused it.*blk.9.*not exist"),
        ({"width": 1}, r"(?s)llama.cpp refused it.*incorrect shape"),
    ],
    ids=["architecture", "kind", "tensor", "shape"],
)
def test_an_adapter_of_another_model_is_refused(
    dial: Dial, tmp_path: Path, faults: dict[str, Any], said: str
) -> None:
    lora = adapter(tmp_path / "lora.gguf", dial("tiny"), **faults)
    with pytest.raises(ModelRefusedError, match=said):
        load(dial("tiny"), depth=2, lora_path=str(lora))


def test_a_key_of_a_wrong_type_is_refused(dial: Dial, tmp_path: Path, rewrite: Rewrite) -> None:
    """llama.cpp would end the process."""
    wrong = {"adapter.lora.alpha": Value(ValueType.STRING, "8")}
    lora = rewrite(adapter(tmp_path / "lora.gguf", dial("tiny")), keys=wrong)
    with pytest.raises(ModelRefusedError, match="alpha: expected type F32, found STRING"):
        load(dial("tiny"), depth=2, lora_path=str(lora))


def test_a_file_that_is_no_adapter_is_refused(dial: Dial, tmp_path: Path) -> None:
    model = dial("tiny")
    (tmp_path / "adapter.safetensors").write_bytes(bytes(100))
    for path, said in (
        (tmp_path / "missing.gguf", r"lora_path: expected a LoRA adapter, found no file .*missing"),
        (tmp_path / "adapter.safetensors", "GGUF.*convert_lora_to_gguf.py"),
        (tmp_path, "convert_lora_to_gguf.py"),
        (model, "general.type: expected adapter for a LoRA adapter of this model, found model"),
    ):
        with pytest.raises(ModelRefusedError, match=said):
            load(model, lora_path=str(path))
