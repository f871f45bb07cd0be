"""llama.cpp's own sampler chains, and the distributions that they compute from logits."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtp_gguf.native.runtime import llama_cpp


@dataclass(frozen=True)
class Chain:
    """Top-k, top-p, min-p, temperature, in this order; 0, 1 and 0 switch the filters off."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def options(self) -> dict[str, Any]:
        """For Session.set_sampling, but for its seed."""
        return {**vars(self)}

    def build(self, seed: int) -> Any:
        """A llama_sampler that draws; the caller frees it."""
        smpl = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
        for sampler in (
            llama_cpp.llama_sampler_init_top_k(self.top_k),
            llama_cpp.llama_sampler_init_top_p(self.top_p, 1),
            llama_cpp.llama_sampler_init_min_p(self.min_p, 1),
            llama_cpp.llama_sampler_init_temp(self.temperature),
            llama_cpp.llama_sampler_init_dist(seed),
        ):
            llama_cpp.llama_sampler_chain_add(smpl, sampler)
        return smpl

    def distribution(self, logits: np.ndarray) -> dict[int, float]:
        """Probabilities of the tokens that the filters leave."""
        smpl = self.build(1)
        data = (llama_cpp.llama_token_data * len(logits))()
        view = np.ctypeslib.as_array(data)
        view["id"], view["logit"], view["p"] = np.arange(len(logits)), logits, 0
        array = llama_cpp.llama_token_data_array(data, len(logits), -1, False)
        llama_cpp.llama_sampler_apply(smpl, ctypes.byref(array))
        llama_cpp.llama_sampler_free(smpl)
        return {int(array.data[i].id): array.data[i].p for i in range(array.size)}
