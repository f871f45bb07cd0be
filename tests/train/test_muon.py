"""Muon's steps, against the singular value decomposition."""

from __future__ import annotations

import pytest
import torch

from mtp_gguf.train.muon import Muon, equalized


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (32, 32), (3, 24, 40)], ids=str)
def test_all_directions_have_about_the_same_length(shape: tuple[int, ...]) -> None:
    """The singular vectors stay, and the singular values become about 1."""
    random = torch.Generator().manual_seed(1)
    left, _, right = torch.linalg.svd(torch.randn(shape, generator=random), full_matrices=False)
    values = torch.logspace(-2, 0, left.shape[-1])  # the smallest: 0.006 of the norm, or less
    matrix = left * (values / values.norm()) @ right
    found = left.mT @ equalized(3 * matrix) @ right.mT
    scaled = torch.diagonal(found, dim1=-2, dim2=-1)
    assert 0.2 < scaled.min() <= scaled.max() < 1.28
    assert scaled[..., values / values.norm() > 0.01].min() > 0.72
    assert torch.allclose(found, torch.diag_embed(scaled), atol=1e-3)


def test_a_step_has_the_size_of_the_rate() -> None:
    """Also where the gradient is small, and for a matrix of a stack by itself."""
    for scale in (1.0, 1e-6):
        gradient = torch.randn((2, 48, 32), generator=torch.Generator().manual_seed(2)) * scale
        weight = torch.nn.Parameter(torch.zeros_like(gradient))
        weight.grad = gradient
        optimizer = Muon([weight], torch.float32, 0.0)
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.step()
        for changed, slope in zip(weight.detach(), gradient, strict=True):
            assert changed.square().mean().sqrt() == pytest.approx(0.002, rel=0.2)
            assert (changed * slope).sum() < 0


def test_unused_matrices_stay() -> None:
    """Experts that no token of a batch selects have a gradient of zeros, or none."""
    first, second = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    first.grad = torch.zeros(4, 4)
    optimizer = Muon([first, second], torch.float32, 0.0)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert first.equal(torch.ones(4, 4))
    assert second.equal(torch.ones(4, 4))
