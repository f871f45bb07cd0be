"""Drafters that are no MTP head: files of DFlash, DSpark and Eagle-3, and Gemma 4's assistants.

Each is a small model of its own, which llama-server loads with `-md`. It reads hidden states of
some layers of the model that it was trained for; Gemma 4's assistants read its cache, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import FormatError, RequestError
from ..files.format import ArrayRef, GgufFile, TensorInfo
from .head import MtpHead

_MARKOV = "markov_w1.weight"  # llama.cpp tells DSpark from DFlash by it
_ASSISTANT = "gemma4-assistant"
_EAGLE_LAYERS = 3
_MOST_LAYERS = 512  # LLAMA_MAX_LAYERS in llama-hparams.h
_NAMES = {"eagle3": "Eagle-3", "dflash": "DFlash", _ASSISTANT: "Gemma 4 assistant"}


@dataclass(frozen=True)
class Drafter:
    """A drafter, by the headers of its file.

    name: of its kind. spec_type: llama-server's `--spec-type` for it. width: embedding length of
    the models that it fits. layers: those of the trunk whose input it reads; the number of the
    trunk's layers stands for the output of the last one. trunk: the architecture that it is for,
    None for any. faults: why it cannot be used, one sentence each.
    """

    name: str
    spec_type: str
    width: int
    layers: tuple[int, ...]
    trunk: str | None
    faults: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The drafter in a few words."""
        model = f"a {self.trunk} model" if self.trunk else "a model"
        reads = f", of which it reads layers {', '.join(map(str, self.layers))}"
        return (
            f"{self.name} drafter, for {model} with embeddings of {self.width}"
            f"{reads if self.layers else ''}"
        )


def read_drafter(file: GgufFile, tensors: Mapping[str, TensorInfo]) -> Drafter | None:
    """The drafter in a file; None for every other file."""
    architecture = file.keys.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _NAMES:
        return None
    name, spec_type, trunk = _NAMES[architecture], f"draft-{architecture}", None
    if architecture == _ASSISTANT:
        spec_type, trunk = "draft-mtp", "gemma4"
    elif _MARKOV in tensors:
        name, spec_type = "DSpark", "draft-dspark"
    width_key = {"eagle3": "target_hidden_size", _ASSISTANT: "embedding_length_out"}
    key = f"{architecture}.{width_key.get(architecture, 'embedding_length')}"
    try:
        width = file.integer(key)
        if not width:
            raise FormatError(f"{key}: expected the embedding length of its trunk, found none")
        layers = () if trunk else _layers(file, f"{architecture}.target_layers", architecture)
    except FormatError as error:
        return Drafter(name, spec_type, 0, (), trunk, (str(error),))
    return Drafter(name, spec_type, width, layers, trunk)


def misfits(drafter: Drafter, file: MtpHead, trunk: MtpHead) -> list[str]:
    """Why a drafter does not fit a model, one sentence each; empty if it does.

    file, trunk: the two files, as far as heads are concerned.
    """
    architecture = trunk.file.keys.get("general.architecture")
    if drafter.faults:
        return list(drafter.faults)
    if not isinstance(architecture, str) or read_drafter(trunk.file, trunk.tensors):
        return [f"expected a model to draft for, found architecture {architecture!r}"]
    if drafter.trunk not in (None, architecture):
        return [f"expected a {drafter.trunk} model, found {architecture}"]
    try:
        width, blocks, heads = (
            trunk.file.integer(f"{architecture}.{key}")
            for key in ("embedding_length", "block_count", "nextn_predict_layers")
        )
        file.check_vocabulary(trunk)
    except (FormatError, RequestError) as error:
        return [str(error)]
    found = []
    if width != drafter.width:
        found.append(f"expected a model with embeddings of {drafter.width}, found {width}")
    layers = (blocks or 0) - (heads or 0)
    if max(drafter.layers, default=0) > layers:
        found.append(f"expected a model with at least {max(drafter.layers)} layers, found {layers}")
    return found


def _layers(file: GgufFile, key: str, architecture: str) -> tuple[int, ...]:
    held = file.keys.get(key)
    few = isinstance(held, ArrayRef) and held.count <= _MOST_LAYERS
    layers = file.array(key) if few else None
    if not layers:
        raise FormatError(f"{key}: expected numbers of layers of the trunk, found none")
    whole = [n for n in layers if isinstance(n, int) and 0 <= n <= _MOST_LAYERS]
    if len(whole) != len(layers):
        raise FormatError(
            f"{key}: expected numbers of layers up to {_MOST_LAYERS}, found {layers!r:.80}"
        )
    if architecture == "eagle3" and len(whole) != _EAGLE_LAYERS:
        raise FormatError(f"{key}: expected {_EAGLE_LAYERS} layers, found {len(whole)}")
    return tuple(whole)
