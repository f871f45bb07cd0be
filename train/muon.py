"""Muon: momentum whose singular values are made equal, for the matrices of a block.

A gradient of few tokens has few large singular values, and Adam's steps follow them. With equal
ones a step teaches all directions alike, from which random weights gain most (Jordan et al. 2024;
benchmarks/README.md has figures). Newton-Schulz iterations equalize them, which are products only.
PyTorch's own (torch.optim.Muon, from 2.9 on) takes single matrices; those of experts are stacked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_MOMENTUM = 0.95
# Polynomials a x + b x^3 + c x^5, one after the other. Each is the best approximation of 1 where
# those before leave the values of [0.01, 1] (the Polar Express, arXiv 2505.16932), which end up in
# [0.73, 1.27]. Five iterations of Muon's first polynomial also raise smaller values, but what they
# take is better spent on more steps (benchmarks/README.md).
_COEFFICIENTS = ((8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526))
# The root mean square of Adam's steps at the same rate (arXiv 2502.16982).
_STEP = 0.2


class Muon(torch.optim.Optimizer):
    """Its parameters have two dimensions, or three: matrices that are stacked.

    products: the type of the products. weight_decay: relative to the rate.
    """

    def __init__(
        self, params: Iterable[Tensor], products: torch.dtype, weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": weight_decay})
        self._products = products

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Change every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                mean = state["momentum"].lerp_(parameter.grad, 1 - _MOMENTUM)
                ahead = parameter.grad.lerp(mean, _MOMENTUM)
                size = _STEP * math.sqrt(max(parameter.shape[-2:]))
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(
                    equalized(ahead.to(self._products)).to(parameter.dtype),
                    alpha=-group["lr"] * size,
                )


def equalized(matrix: Tensor) -> Tensor:
    """`matrix` [..., rows, columns] with singular values of about 1, small ones excepted."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    for a, b, c in _COEFFICIENTS:
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x
