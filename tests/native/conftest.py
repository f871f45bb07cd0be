"""Small GGUF files for the native library's tests, made by our converter; a way to break them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from checkpoints import SPECS, Spec, write_checkpoint
from reference import ReferenceModel

from mtp_gguf.convert.blueprint import HeadChoice
from mtp_gguf.convert.checkpoint import open_checkpoint
from mtp_gguf.convert.pipeline import run
from mtp_gguf.convert.plan import DraftRequest, Request
from mtp_gguf.convert.plan_checkpoint import make_plans
from mtp_gguf.convert.precision import parse_tensor_type
from mtp_gguf.convert.source_rows import SourceRows
from mtp_gguf.gguf_tools.fastmtp import DraftLayout
from mtp_gguf.gguf_tools.format import TensorSpec, Value, lay_out, open_gguf
from mtp_gguf.gguf_tools.tensor_types import TensorType

DRAFT_SIZE = 300  # of the 1,024 tokens of the tiny checkpoints
DEMO = Path(__file__).parents[2] / "gguf_tools" / "demo_model"


def convert(
    folder: Path,
    path: Path,
    quant: str,
    head: str,
    draft: DraftRequest | None = None,
    choice: HeadChoice = HeadChoice.WITH_TRUNK,
) -> Path:
    """Convert a checkpoint to `path`."""
    checkpoint = open_checkpoint(folder)
    request = Request(
        quant=quant,
        head=choice,
        head_type=parse_tensor_type(head, "head"),
        draft=draft,
        output=path,
    )
    run(make_plans(checkpoint, request), SourceRows(checkpoint), lambda _: None)
    return path


class Models:
    """Checkpoints and GGUF files by what they are, each made once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._references: dict[str, ReferenceModel] = {}

    def checkpoint(self, spec: str | Spec | Path) -> Path:
        """The folder of a spec, or of the trained model "demo", or a folder as it is."""
        if isinstance(spec, Path):
            return spec
        if spec == "demo":
            return DEMO
        spec = SPECS[spec] if isinstance(spec, str) else spec
        folder = self.root / spec.name
        return folder if folder.is_dir() else write_checkpoint(folder, spec)

    def reference(self, spec: str | Spec) -> ReferenceModel:
        name = spec if isinstance(spec, str) else spec.name
        if name not in self._references:
            self._references[name] = ReferenceModel(self.checkpoint(spec))
        return self._references[name]

    def ranked_ids(self, seed: int = 3) -> list[int]:
        """A list in no order that its ids could explain; the converter adds the required ones."""
        return np.random.default_rng(seed).permutation(900)[:DRAFT_SIZE].tolist()

    def gguf(
        self,
        spec: str | Spec | Path = "dense-tied",
        quant: str = "F32",
        head: str = "F32",
        layout: str | None = None,
        choice: HeadChoice = HeadChoice.WITH_TRUNK,
    ) -> Path:
        """The converted file: base and head types, and a draft vocabulary in `layout`."""
        name = spec if isinstance(spec, str) else spec.name
        path = self.root / f"{name}-{quant}-{head}-{layout}-{choice.name}.gguf"
        if path.exists():
            return path
        draft = None
        if layout:
            ids = self.root / "ids.txt"
            ids.write_text("\n".join(map(str, self.ranked_ids())), encoding="utf-8")
            draft = DraftRequest(DraftLayout(layout), ids_file=ids)
        return convert(self.checkpoint(spec), path, quant, head, draft, choice)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


Tensor = tuple[tuple[int, ...], TensorType, bytes]
Rewrite = Callable[..., Path]


@pytest.fixture
def rewrite(tmp_path: Path) -> Rewrite:
    """Copy a GGUF with some keys and tensors changed; None drops one."""

    def copy(
        path: Path,
        keys: Mapping[str, Value | None] | None = None,
        tensors: Mapping[str, Tensor | None] | None = None,
    ) -> Path:
        with open_gguf(path) as file:
            metadata: dict[str, Any] = {key: file.value(key) for key in file.keys}
            metadata.update(keys or {})
            metadata = {key: value for key, value in metadata.items() if value is not None}
            content: dict[str, Tensor | None] = {
                t.name: (t.shape, t.type, bytes(file.source.read(t.offset, t.nbytes)))
                for t in file.tensors
            }
        content.update(tensors or {})
        kept = {name: tensor for name, tensor in content.items() if tensor is not None}
        layout = lay_out(
            metadata, [TensorSpec(n, shape, kind) for n, (shape, kind, _) in kept.items()]
        )
        data = bytearray(layout.size)
        data[: len(layout.header)] = layout.header
        for offset, (_, _, raw) in zip(layout.offsets, kept.values(), strict=True):
            data[offset : offset + len(raw)] = raw
        out = tmp_path / f"rewritten-{len(list(tmp_path.iterdir()))}.gguf"
        out.write_bytes(data)
        return out

    return copy


def _load_dial_model() -> ModuleType:
    """benchmarks/dial_model.py, which is no package."""
    path = Path(__file__).parents[2] / "benchmarks" / "dial_model.py"
    spec = spec_from_file_location("dial_model", path)
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

    def successors(self, shape: str) -> dict[int, int]:
        """What the trunk says after each token of its cycle."""
        cycle = self.module.cycle_of(self.module.SHAPES[shape]).tolist()
        return dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))

    def missed(self, shape: str, hit: float = 0.7) -> np.ndarray:
        """Whether the head is wrong after a token, [vocabulary]."""
        marks: np.ndarray = self.module.missed_tokens(self.module.SHAPES[shape], hit)
        return marks


@pytest.fixture(scope="session")
def dial(models: Models) -> Dial:
    return Dial(models)
