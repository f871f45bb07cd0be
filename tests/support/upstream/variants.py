"""Which conversions of which checkpoints have goldens, and how each tool is asked for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from support.checkpoints import SPECS, Spec


@dataclass(frozen=True)
class Variant:
    """One conversion of one checkpoint.

    `mtp` is the type of the MTP block's matrices. `part` is what of the model is written: all of
    it, the trunk alone, or the MTP block with embeddings and output.
    """

    quant: str
    mtp: str = "F16"
    imatrix: bool = False
    part: Literal["all", "no-mtp", "head-only"] = "all"

    @property
    def label(self) -> str:
        """Name the variant in goldens and test ids."""
        words = [self.quant]
        if self.part != "all":
            words.append(self.part)
        elif self.mtp not in ("F16", self.quant):
            words.append(f"mtp-{self.mtp}")
        if self.imatrix:
            words.append("imatrix")
        return "+".join(words)

    @property
    def slow(self) -> bool:
        """Say whether ggml first builds search tables for this type, which takes it 3 to 20 s."""
        return self.quant.startswith(("IQ1_", "IQ2_", "IQ3_X"))

    def our_arguments(self, imatrix: Path | None) -> list[str]:
        """Give the options of `mtp-gguf convert` that ask for this variant."""
        args = ["--quant", self.quant]
        if self.part == "no-mtp":
            args.append("--no-mtp")
        else:
            args += ["--mtp-f16"] if self.mtp == "F16" else ["--mtp-type", self.mtp]
        if self.part == "head-only":
            args.append("--head-only")
        if self.imatrix:
            args += ["--imatrix", str(imatrix)]
        return args

    def converter_flags(self) -> list[str]:
        """Give the flags of convert_hf_to_gguf.py for this part of the model."""
        return {"all": [], "no-mtp": ["--no-mtp"], "head-only": ["--mtp"]}[self.part]

    def tensor_types(self, spec: Spec) -> list[tuple[str, str]]:
        """Give the `--tensor-type` overrides of llama-quantize for the MTP block."""
        return [] if self.part == "no-mtp" else [(rf"blk\.{spec.layers}\..*", self.mtp)]


# llama-quantize applies overrides only when the base type is a quantized one: a BF16 file of
# upstream's has a BF16 head.
CORE = (
    Variant("F16"),
    Variant("BF16", mtp="BF16"),
    *(Variant(quant) for quant in ("Q8_0", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS")),
)

_OTHER_QUANTS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q5_K_S"),
    *("IQ4_NL", "IQ3_S", "IQ3_M", "TQ1_0", "TQ2_0", "MXFP4_MOE"),
)


def _with_imatrix(*quants: str) -> tuple[Variant, ...]:
    return tuple(Variant(quant, imatrix=True) for quant in quants)


_MORE: dict[str, tuple[Variant, ...]] = {
    # One dense and one MoE checkpoint see every mix; an imatrix changes some of them.
    "dense-deep": (
        *(Variant(quant) for quant in _OTHER_QUANTS),
        *_with_imatrix("Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS", "IQ4_NL", "Q4_0", "Q5_0", "Q2_K"),
        *_with_imatrix("Q3_K_M", "Q2_K_S", "IQ3_XXS", "IQ3_XS"),
        *_with_imatrix("IQ2_M", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
    ),
    "moe-fused": (*(Variant(quant) for quant in _OTHER_QUANTS), *_with_imatrix("Q4_K_M", "IQ4_XS")),
    "moe-mixed": (Variant("Q4_K_M", mtp="Q8_0"), *_with_imatrix("Q4_K_M", "IQ4_XS", "Q4_0")),
    "dense-ragged": (Variant("Q4_K_M", mtp="Q8_0"), Variant("Q2_K"), *_with_imatrix("Q4_K_M")),
    "dense-tied": (
        Variant("Q4_K_M", mtp="Q8_0"),
        Variant("Q4_K_M", part="no-mtp"),
        Variant("Q4_K_M", part="head-only"),
        Variant("F16", part="head-only"),
    ),
    "dense-untied": (
        Variant("Q4_K_M", mtp="Q4_K"),
        Variant("Q8_0", part="no-mtp"),
        Variant("Q4_K_M", part="head-only"),
    ),
    "next-unfused": (
        Variant("Q4_K_M", mtp="Q8_0"),
        Variant("Q4_K_M", part="no-mtp"),
        Variant("Q4_K_M", part="head-only"),
        *_with_imatrix("Q4_K_M"),
    ),
    "dense-f32": (Variant("F32", mtp="F32"), *_with_imatrix("Q4_K_M")),
    "dense-fp8": (Variant("F32", mtp="F32"),),
}


def variants(spec: Spec) -> Iterator[Variant]:
    """List the variants of a checkpoint that have goldens.

    Of layouts that store matrices in fewer bits, the exact numbers; or the blocks that upstream
    keeps, which its quantizer would refuse.
    """
    if spec.layout:
        yield Variant("BF16", mtp="BF16") if spec.keeps_blocks else Variant("F32", mtp="F32")
        return
    for variant in (*CORE, *_MORE.get(spec.name, ())):
        yield variant if spec.mtp else Variant(variant.quant, part="no-mtp")


def all_cases() -> list[tuple[Spec, Variant]]:
    """List every (checkpoint, variant) that has a golden."""
    return [(spec, variant) for spec in SPECS.values() for variant in variants(spec)]
