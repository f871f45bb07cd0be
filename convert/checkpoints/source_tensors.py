"""Accounts for the tensors of a checkpoint: every one is used, or skipped for a reason."""

from collections.abc import Mapping

from mtp_gguf.gguf_tools.errors import CheckpointError

from .checkpoint import Checkpoint, canonical_name, is_head, is_vision
from .quantized import weights_of
from .weights import ScaledWeight, read_integers

Shape = tuple[int, ...]

VISION_NOTE = "vision tower; --mmproj writes it into a file of its own"
# Buffers that older versions of transformers and some tools save, although all compute them.
_COMPUTED = (
    *(".rotary_emb.inv_freq", ".rotary_emb.original_inv_freq"),
    *(".attention.masked_bias", ".attention.bias"),
)
_COMPUTED_NOTE = "computed by the runtime, not stored"
# Parts of names in a model with an adapter (peft), whose weights are not those of the layers.
_ADAPTER = (".lora_", ".base_layer.", ".modules_to_save.", ".original_module.")
_ROOTS = ("model.", "mtp.", "lm_head.")


class SourceTensors:
    """Source tensors by canonical name; records which are used, and checks their shapes.

    vision_note: why the vision tower is not part of the model.
    """

    def __init__(self, checkpoint: Checkpoint, vision_note: str = VISION_NOTE) -> None:
        self._checkpoint = checkpoint
        self._weights = weights_of(checkpoint.tensors)
        self._actual: dict[str, str] = {}
        self._unused: dict[str, str] = {}
        self._used: set[str] = set()
        for name in self._weights.by_name:
            canonical = canonical_name(name)
            if is_vision(name):
                self._unused[name] = vision_note
                continue
            if canonical.endswith(_COMPUTED):
                self._unused[name] = _COMPUTED_NOTE
                continue
            if canonical in self._actual:
                raise CheckpointError(
                    f"{checkpoint.folder}: {name!r} and {self._actual[canonical]!r} are the "
                    "same tensor of the model"
                )
            self._actual[canonical] = name
        self._check_names()

    def has(self, canonical: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return canonical in self._actual

    def names_under(self, prefix: str) -> list[str]:
        """The canonical names that begin with `prefix`, sorted."""
        return sorted(name for name in self._actual if name.startswith(prefix))

    def use(self, canonical: str, shape: Shape) -> str:
        """Mark a source tensor as used and return its name in the files; checks its shape."""
        name = self._actual.get(canonical)
        if name is None:
            folder = self._checkpoint.head_folder if is_head(canonical) else self._checkpoint.folder
            raise CheckpointError(
                f"{folder}: {canonical}: expected shape {list(shape)} by the "
                "config, found no such tensor"
            )
        weight = self._weights.by_name[name]
        if weight.shape != shape:
            raise CheckpointError(
                f"{weight.where}: {name}: expected shape {list(shape)} by the config, "
                f"found {list(weight.shape)}"
            )
        self._used.add(canonical)
        return name

    def devices(self, canonical: str) -> int:
        """Among how many devices the rows of a matrix with FP8 blocks were divided; else 1."""
        weight = self._weights.by_name.get(self._actual.get(canonical, ""))
        return weight.devices if isinstance(weight, ScaledWeight) else 1

    def rows(self, canonical: str, width: int) -> int:
        """The number of rows of a matrix whose rows have this width; does not use it."""
        name = self._actual.get(canonical, "")
        weight = self._weights.by_name.get(name)
        if weight is None or len(weight.shape) != 2 or weight.shape[1] != width:
            found = "no such tensor" if weight is None else f"shape {list(weight.shape)}"
            raise CheckpointError(
                f"{self._checkpoint.folder}: {canonical}: expected rows of {width} by the config, "
                f"found {found}"
            )
        return weight.shape[0]

    def integers(self, canonical: str, count: int) -> tuple[int, ...]:
        """Use a source tensor of whole numbers that are not negative, and read it."""
        name = self.use(canonical, (count,))
        tensor = self._checkpoint.tensors[name]
        values = read_integers(tensor)
        if min(values) < 0:
            raise CheckpointError(
                f"{tensor.source.name}: {name}: expected no negative number, found {min(values)}"
            )
        return values

    def _check_names(self) -> None:
        """CheckpointError for names of an adapter, or with a prefix that nobody explains."""
        folder = self._checkpoint.folder
        for canonical, name in self._actual.items():
            if any(part in name for part in _ADAPTER):
                raise CheckpointError(
                    f"{folder}: {name!r} is part of a LoRA adapter; merge it into the model first "
                    "(merge_and_unload of peft) and convert the result"
                )
            if root := next((root for root in _ROOTS if f".{root}" in canonical), None):
                prefix, _, suffix = canonical.partition(f".{root}")
                raise CheckpointError(
                    f"{folder}: expected a tensor {root + suffix!r}, found {name!r}; save the "
                    f"model without the prefix {prefix + '.'!r}, which no known tool adds"
                )

    def skipped(self, unwanted: Mapping[str, str]) -> dict[str, str]:
        """Source tensors that are skipped on purpose, with the reason.

        unwanted: the reason by prefix, for the parts of the model that are not converted.
        CheckpointError if any other tensor was not used.
        """
        skipped = {**self._unused, **self._weights.unused}
        lost = []
        for canonical in sorted(self._actual.keys() - self._used):
            prefix = next(filter(canonical.startswith, unwanted), None)
            if prefix is not None:
                skipped[self._actual[canonical]] = unwanted[prefix]
            else:
                lost.append(self._actual[canonical])
        if lost:
            raise CheckpointError(
                f"{self._checkpoint.folder}: {len(lost)} tensors are not part of this model, "
                f"first {lost[0]!r}; this kind of checkpoint is not supported"
            )
        return skipped


def ggml_shape(shape: Shape) -> Shape:
    """A source shape in ggml order, without trailing ones (like ggml_n_dims)."""
    out = [n for i, n in enumerate(shape) if n != 1 or i == len(shape) - 1]
    return tuple(reversed(out))
