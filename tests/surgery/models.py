"""Shared helpers: files converted once, edited files, greedy text."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path

from checkpoints import SPECS, Spec, write_checkpoint
from conversions import check_refusal, held, invoke

from mtp_gguf.gguf_tools.model import Metadata, open_model
from mtp_gguf.gguf_tools.rewrite import OutputSpec, TensorCopy, write

# Dense and MoE, tied and not, rows that blocks do not divide, more value heads than key heads.
COVERED = [
    SPECS[name]
    for name in (
        "dense-tied",
        "dense-untied",
        "dense-3v",
        "dense-ragged",
        "moe-fused",
        "moe-unfused",
        "moe-mixed",
    )
]
DENSE, MOE = SPECS["dense-3v"], SPECS["moe-mixed"]


class Models:
    """Checkpoints and what `convert` makes of them, by spec and options; all are read only."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._numbers = count()
        self._made: dict[tuple[object, ...], Path] = {}

    def checkpoint(self, spec: Spec) -> Path:
        if (spec,) not in self._made:
            folder = self._folder("hf") / spec.name
            self._made[(spec,)] = write_checkpoint(folder, spec)
        return self._made[(spec,)]

    def _folder(self, kind: str) -> Path:
        folder = self._root / kind / f"{next(self._numbers)}"
        folder.mkdir(parents=True)
        return folder

    def copy(self, spec: Spec, parent: Path) -> Path:
        return shutil.copytree(self.checkpoint(spec), parent / spec.name)

    def gguf(self, spec: Spec, *options: object) -> Path:
        """The file that `convert SPEC OPTIONS` writes."""
        key = ("gguf", spec, *map(str, options))
        if key not in self._made:
            folder = self._folder("gguf")
            succeed("convert", self.checkpoint(spec), "-o", folder / "model.gguf", *options)
            self._made[key] = sorted(folder.iterdir())[0]
        return self._made[key]


def succeed(*arguments: object) -> str:
    """Run `mtp-gguf ARGUMENTS`, which must succeed, and return its output."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


def refused(folder: Path, *arguments: object, words: tuple[str, ...] = (), code: int = 1) -> str:
    """Run what must fail with one sentence that has the words, and leave `folder` as it is."""
    before = held(folder)
    result = invoke(*arguments)
    message = check_refusal(result.exit_code, result.stderr, *words, code=code)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert held(folder) == before
    return message


def edited(
    source: Path,
    target: Path,
    *,
    metadata: Callable[[Metadata], object] = lambda _: None,
    tensors: Callable[[dict[str, TensorCopy]], object] = lambda _: None,
) -> Path:
    """A copy of a GGUF with edited keys and tensors."""
    with open_model(source) as model:
        keys = model.metadata()
        copies = {name: TensorCopy.of(model, name) for name in model.tensors}
        metadata(keys)
        tensors(copies)
        write(target, OutputSpec(keys, tuple(copies.values())))
    return target


def greedy_text(path: Path, tokens: int = 24) -> list[int]:
    """llama.cpp's continuation of a fixed prompt at temperature 0."""
    from mtp_gguf.native.runtime import llama_cpp  # noqa: PLC0415

    prompt = [65, 66, 300, 301, 302, 67, 68]
    with closing(llama_cpp.Llama(str(path), n_ctx=128, verbose=False)) as llm:
        generated = []
        for token in llm.generate(prompt, temp=0.0):
            generated.append(int(token))
            if len(generated) == tokens:
                break
    return generated
