"""What models share whose layers are converted one by one, most of their tensors as they are.

A family's file describes the tensors of a layer; here are the parts of a model (trunk, head, and
what both share), and what is said of a head that is missing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import CheckpointError
from mtp_gguf.gguf_tools.files.tensor_types import F32, TensorType

from ..checkpoints.checkpoint import APPENDED_KEY, Checkpoint
from ..checkpoints.config import ConfigReader
from ..checkpoints.quantized import check_schemes
from ..checkpoints.source_tensors import SourceTensors, ggml_shape
from ..plans.recipe import Arithmetic, Order, Recipe, Target
from .parts import wants
from .target_model import HeadChoice, TargetModel, typed

OTHER_TOWERS = "vision and audio towers, which llama.cpp's converter writes (--mmproj)"


@dataclass(frozen=True)
class Layer:
    """A layer of a checkpoint and the block that it becomes, by the prefixes of their names."""

    sources: SourceTensors
    source: str
    target: str

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor."""
        return self.sources.has(self.source + name)

    def take(
        self,
        name: str,
        target: str,
        *shape: int,
        arithmetic: Arithmetic = Arithmetic.NONE,
        row_order: Order | None = None,
        fixed: TensorType | None = None,
    ) -> Target:
        """The target of one tensor of this shape; vectors are always F32."""
        recipe = Recipe(
            (self.sources.use(self.source + name, shape),),
            row_order=row_order,
            arithmetic=arithmetic,
        )
        return Target(
            self.target + target, ggml_shape(shape), recipe, F32 if len(shape) == 1 else fixed
        )

    def optional(self, name: str, target: str, *shape: int) -> Iterator[Target]:
        """The target of a tensor that some checkpoints have."""
        if self.has(name):
            yield self.take(name, target, *shape)

    def folded(
        self,
        name: str,
        target: str,
        count: int,
        width: int,
        arithmetic: Arithmetic = Arithmetic.NONE,
    ) -> Target:
        """The F32 target of a vector of `count` values as rows of `width`."""
        source = self.sources.use(self.source + name, (count,))
        recipe = Recipe((source,), arithmetic=arithmetic, width=width)
        return Target(self.target + target, (width, count // width), recipe, F32)

    def stacked(self, parts: Mapping[str, int], target: str, width: int) -> Target:
        """One target of several tensors, given with their rows, one below the other."""
        sources = tuple(
            self.sources.use(self.source + name, (rows, width)) for name, rows in parts.items()
        )
        return Target(self.target + target, (width, sum(parts.values())), Recipe(sources))

    def experts(self, name: str, target: str, count: int, *shape: int) -> Target:
        """One target of the tensors of all experts; `name` has their number as {}."""
        sources = tuple(
            self.sources.use(self.source + name.format(expert), shape) for expert in range(count)
        )
        return Target(self.target + target, (*reversed(shape), count), Recipe(sources))

    def gated(
        self, hidden: int, inner: int, suffix: str = "", prefix: str = "mlp."
    ) -> list[Target]:
        """The targets of a gated feed-forward network. suffix: of their names, such as `_shexp`."""
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        return [
            self.take(f"{prefix}{part}_proj.weight", f"ffn_{part}{suffix}.weight", *shape)
            for part, shape in shapes.items()
        ]

    def mtp_input(self, hidden: int, arithmetic: Arithmetic = Arithmetic.NONE) -> Iterator[Target]:
        """What an MTP layer begins with. arithmetic: of its norms."""
        yield self.take("eh_proj.weight", "nextn.eh_proj.weight", hidden, 2 * hidden)
        for norm in ("enorm.weight", "hnorm.weight"):
            yield self.take(norm, f"nextn.{norm}", hidden, arithmetic=arithmetic)

    def mtp_output(self, hidden: int, vocab: int) -> Iterator[Target]:
        """What an MTP layer may have of its own in place of the trunk's."""
        yield from self.optional("shared_head.norm.weight", "nextn.shared_head_norm.weight", hidden)
        yield from self.optional("embed_tokens.weight", "nextn.embed_tokens.weight", vocab, hidden)
        yield from self.optional(
            "shared_head.head.weight", "nextn.shared_head_head.weight", vocab, hidden
        )

    def gated_experts(self, hidden: int, inner: int, count: int) -> list[Target]:
        """The targets of a router, its bias, and gated experts, which are one tensor each."""
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        return [
            self.take("mlp.gate.weight", "ffn_gate_inp.weight", count, hidden, fixed=F32),
            self.take("mlp.gate.e_score_correction_bias", "exp_probs_b.bias", count),
            *(
                self.experts(
                    f"mlp.experts.{{}}.{part}_proj.weight", f"ffn_{part}_exps.weight", count, *shape
                )
                for part, shape in shapes.items()
            ),
        ]


@dataclass(frozen=True)
class LayeredModel:
    """A model whose layers are converted one by one.

    shared, trunk, head: targets, made when they are read, so that no other part's tensors
    count as used. Those of `shared` end with the one whose rows are the vocabulary. hparams: the
    metadata for a number of MTP layers, as `typed` takes them. trunk_names,
    head_names, shared_names: how the names of tensors begin. never: why tensors are in no file, by
    how their names begin. computed: F32 tensors that trunk and head share and no source has.
    splits, tokens: those of the TargetModel.
    """

    architecture: str
    n_trunk: int
    n_mtp: int
    n_vocab: int
    shared: Iterable[Target]
    trunk: Iterable[Target]
    head: Iterable[Target]
    hparams: Callable[[int], Mapping[str, object]]
    trunk_names: Sequence[str] = ("model.layers.",)
    head_names: Sequence[str] = ("mtp.",)
    shared_names: Sequence[str] = ("model.embed_tokens.", "model.norm.", "lm_head.")
    never: Mapping[str, str] = field(default_factory=dict)
    computed: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    splits: Mapping[str, str] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)

    def target_model(self, sources: SourceTensors, part: HeadChoice) -> TargetModel:
        """Name and shape of every target of a part; CheckpointError for unknown tensors."""
        alone = part in (HeadChoice.ALONE, HeadChoice.BLOCK)
        shared = [] if part is HeadChoice.BLOCK else list(self.shared)
        trunk = [] if alone else list(self.trunk)
        n_mtp = 0 if part is HeadChoice.NONE else self.n_mtp
        head = list(self.head) if n_mtp else []
        return TargetModel(
            architecture=self.architecture,
            hparams=typed(self.architecture, self.hparams(n_mtp)),
            targets=(*shared, *trunk, *head),
            skipped=sources.skipped({**self._unwanted(part), **self.never}),
            n_trunk=self.n_trunk,
            n_mtp=n_mtp,
            n_vocab=self.n_vocab,
            output=shared[-1] if shared else None,
            computed={} if part is HeadChoice.BLOCK else self.computed,
            splits=self.splits,
            tokens=self.tokens,
        )

    def _unwanted(self, part: HeadChoice) -> dict[str, str]:
        """Why source tensors are not converted, by prefix."""
        if part is HeadChoice.NONE:
            return dict.fromkeys(self.head_names, "MTP head (--no-mtp)")
        if part is HeadChoice.ALONE:
            return dict.fromkeys(self.trunk_names, "trunk (--head-only)")
        if part is HeadChoice.BLOCK:
            return dict.fromkeys((*self.trunk_names, *self.shared_names), "outside the MTP head")
        return {}


def last_norm_and_vocabulary(sources: SourceTensors, hidden: int, vocab: int) -> Iterator[Target]:
    """What trunk and head share, as most models name it: the last norm, embedding and output."""
    model = Layer(sources, "", "")
    yield model.take("model.norm.weight", "output_norm.weight", hidden)
    yield model.take("model.embed_tokens.weight", "token_embd.weight", vocab, hidden)
    yield model.take("lm_head.weight", "output.weight", vocab, hidden)


def opened(checkpoint: Checkpoint, part: HeadChoice) -> SourceTensors:
    """The tensors of a checkpoint, after a check that those of the part can be converted."""
    check_schemes(
        tensor
        for name, tensor in checkpoint.tensors.items()
        if wants(name, part, checkpoint.config)
    )
    return SourceTensors(checkpoint, OTHER_TOWERS)


def count_mtp_layers(
    checkpoint: Checkpoint, config: ConfigReader, part: HeadChoice, parts: int = 1
) -> int:
    """The number of MTP layers of the checkpoint, of which each is `parts` layers there.

    CheckpointError if the config and the tensors disagree, or if there is none and the part is the
    head.
    """
    found, claimed = checkpoint.head_layers() // parts, config.size(APPENDED_KEY, 0, least=0)
    if part is HeadChoice.NONE:
        return found
    if not found and part is not HeadChoice.WITH_TRUNK:
        option = "--head-only: " if part is HeadChoice.ALONE else ""
        raise CheckpointError(
            f"{checkpoint.folder}: {option}expected tensors of MTP layers, found none; "
            "use the publisher's original checkpoint, or --from to take them from another one"
        )
    if claimed and found != claimed:
        raise CheckpointError(
            f"{config.where}: {APPENDED_KEY} is {claimed}, but the checkpoint has "
            f"{'those of ' if found else ''}{found or 'no'} MTP layers; either convert without "
            "the head (--no-mtp), or take it from the original model (--from ORIGINAL)"
        )
    return found
