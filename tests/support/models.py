"""Models to test with: tiny checkpoints, and the GGUF files that `convert` makes of them.

Each is made once in a run of the tests (fixtures `models`, `dial` and `files`) and never changed.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np

from mtp_gguf.convert.families.target_model import HeadChoice
from support.checkpoints import SPECS, TINY, Spec, write_checkpoint
from support.commands import succeed
from support.reference_model import ReferenceModel
from support.upstream import nextn_models

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "gguf_tools" / "demo_model"
DRAFT_SIZE = 300  # of the 1,024 tokens of the tiny checkpoints
_HEAD = {
    HeadChoice.WITH_TRUNK: (),
    HeadChoice.NONE: ("--no-mtp",),
    HeadChoice.ALONE: ("--head-only",),
}


class Files(Protocol):
    """Makes GGUF files, each once: never write to one."""

    def __call__(self, layout: str, spec: str | Path = "dense-3v") -> Path:
        """The file of a layout of server/conftest.py.

        spec: of `checkpoints.SPECS`, the `demo`, or the folder of a checkpoint.
        """


class Models:
    """Checkpoints and GGUF files by what they are, each made once; all are read only.

    A model is a spec or the name of one, the trained model "demo", or a folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._checkpoints: dict[Spec, Path] = {}
        self._files: dict[tuple[Path | str, ...], Path] = {}
        self._references: dict[Path, ReferenceModel] = {}

    def checkpoint(self, model: str | Spec | Path) -> Path:
        """The folder of a model."""
        if isinstance(model, Path):
            return model
        if model == "demo":
            return DEMO
        spec = SPECS[model] if isinstance(model, str) else model
        if spec not in self._checkpoints:
            folder = self.root / "hf" / str(len(self._checkpoints)) / spec.name
            self._checkpoints[spec] = write_checkpoint(folder, spec)
        return self._checkpoints[spec]

    def copy(self, spec: Spec, parent: Path) -> Path:
        """A copy of a checkpoint, which may be changed."""
        return shutil.copytree(self.checkpoint(spec), parent / spec.name)

    def reference(self, model: str | Spec) -> ReferenceModel:
        """What the checkpoint's weights compute, in NumPy."""
        folder = self.checkpoint(model)
        if folder not in self._references:
            self._references[folder] = ReferenceModel(folder)
        return self._references[folder]

    def convert(self, model: str | Spec | Path, *options: object) -> Path:
        """The file that `convert MODEL OPTIONS` writes, the first of several."""
        folder = self.checkpoint(model)
        key: tuple[Path | str, ...] = (folder, *map(str, options))
        if key not in self._files:
            out = self.root / "gguf" / str(len(self._files))
            out.mkdir(parents=True)
            succeed("convert", folder, "-o", out / "model.gguf", *options)
            self._files[key] = min(out.iterdir())
        return self._files[key]

    def ranked_ids(self, seed: int = 3) -> list[int]:
        """A list in no order that its ids could explain; the converter adds the required ones."""
        ids: list[int] = np.random.default_rng(seed).permutation(900)[:DRAFT_SIZE].tolist()
        return ids

    def ids_file(self) -> Path:
        """The file of `ranked_ids`, for `--fastmtp-ids`."""
        path = self.root / "ids.txt"
        path.write_text("\n".join(map(str, self.ranked_ids())), encoding="utf-8")
        return path

    def gguf(
        self,
        model: str | Spec | Path = "dense-tied",
        quant: str = "F32",
        head: str = "F32",
        layout: str | None = None,
        choice: HeadChoice = HeadChoice.WITH_TRUNK,
    ) -> Path:
        """The converted file: base and head types, and `ranked_ids` for drafts in `layout`."""
        options: list[object] = ["--quant", quant, "--mtp-type", head, *_HEAD[choice]]
        if layout:
            options += ["--fastmtp-layout", layout, "--fastmtp-ids", self.ids_file()]
        return self.convert(model, *options)


def _load_dial_model() -> ModuleType:
    """benchmarks/dial_model.py, which is no package."""
    spec = spec_from_file_location("dial_model", ROOT / "benchmarks" / "dial_model.py")
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Dial:
    """Tiny models whose head is right as often as it is told, and whose state matters a little."""

    LAYER_SCALE = 0.03

    def __init__(self, models: Models) -> None:
        self.models = models
        self.module = _load_dial_model()

    def __call__(
        self,
        shape: str = "tiny",
        hit: float = 0.7,
        quant: str = "Q4_K_M",
        head: str = "F16",
        gain: float = 1.0,
    ) -> Path:
        return self.models.gguf(self.checkpoint(shape, hit, gain), quant, head)

    def checkpoint(self, shape: str, hit: float = 0.7, gain: float = 1.0) -> Path:
        """The folder of a synthetic model, made once."""
        folder = self.models.root / f"dial-{shape}-{hit}-{gain}"
        if not folder.is_dir():
            self.module.write_dial_model(folder, shape, hit, self.LAYER_SCALE, gain)
        return folder

    def gguf(self, architecture: str, hit: float = 0.7) -> Path:
        """The file of an architecture that llama.cpp drafts with, made once."""
        path = self.models.root / f"dial-{hit}" / f"{architecture}.gguf"
        if not path.is_file():
            path.parent.mkdir(exist_ok=True)
            self.module.write_dial_gguf(path.parent, architecture, hit, self.LAYER_SCALE)
        return path

    def gguf_marks(self, hit: float = 0.7) -> tuple[dict[int, int], np.ndarray]:
        """`successors` and `missed` of these files."""
        spec = replace(TINY, vocab_size=nextn_models.TOKENS)
        cycle = self.module.cycle_of(spec).tolist()
        following = dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
        return following, self.module.missed_tokens(spec, hit)

    def successors(self, shape: str) -> dict[int, int]:
        """What the trunk says after each token of its cycle."""
        cycle = self.module.cycle_of(self.module.SHAPES[shape]).tolist()
        return dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))

    def missed(self, shape: str, hit: float = 0.7) -> np.ndarray:
        """Whether the head is wrong after a token, [vocabulary]."""
        marks: np.ndarray = self.module.missed_tokens(self.module.SHAPES[shape], hit)
        return marks
