"""The probability that drafts are accepted, as a loss.

A draft that is sampled from q at temperature T, where the trunk samples from p, is accepted with
probability a = sum(min(p, q)). The loss is 1 - a, the mean over two temperatures: 0.8, and 0.3,
where near ties decide as they do greedily. Unlike the cross-entropy it spends a small block on the
tokens that decide about acceptance rather than on the shape of p among those that are hardly ever
sampled. But it has no gradient where q is far from p. So the cross-entropy at 0.8 is added, times
1 - a as a constant: both are lowest where q is p. benchmarks/README.md has figures.

The trunk's logits are its output matrix times the states on disk, so no logits are stored. Rows go
through in slices, and the gradient is formed in the same walk: the logits of a batch over a large
vocabulary would take gigabytes.
"""

from typing import Any

import torch
from torch import Tensor

# Logits of the trunk in a slice: with 32,768 tokens this is 1.7 times as fast on a CPU as slices of
# 256 rows, because a slice stays in its caches. A GPU needs more to do at once.
_LOGITS_AT_ONCE, _LOGITS_AT_ONCE_ON_GPU = 1 << 21, 1 << 25
_TEMPERATURES = (0.3, 0.8)


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weights: Tensor,
        rows: Tensor,
        output: Tensor,
        trunk_output: Tensor,
        teacher: Tensor,
    ) -> Tensor:
        total = torch.zeros((), device=states.device)
        # Half of the work, which measuring does without.
        gradient = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        on_cpu = states.device.type == "cpu"
        size = max(1, (_LOGITS_AT_ONCE if on_cpu else _LOGITS_AT_ONCE_ON_GPU) // len(output))
        for at in range(0, len(teacher), size):
            wanted = teacher[at : at + size].to(output.dtype) @ trunk_output.T
            bounds = torch.tensor((at, at + size), device=rows.device)
            part = slice(*torch.searchsorted(rows, bounds).tolist())
            scores = states[part].to(output.dtype) @ output.T
            lost, slope = _of_slice(
                scores.float(),
                wanted[rows[part] - at].float(),
                weights[part] / len(_TEMPERATURES),
                wants_slope=gradient is not None,
            )
            total += lost
            if gradient is not None and slope is not None:
                gradient[part] = (slope.to(output.dtype) @ output).to(states.dtype)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None, None, None, None


def _of_slice(
    scores: Tensor, wanted: Tensor, weights: Tensor, *, wants_slope: bool
) -> tuple[Tensor, Tensor | None]:
    """The loss of n drafts, and its slope by their scores.

    scores, wanted: [n, V], logits of the drafts and of the trunk. weights: [n], at a temperature.
    """
    slope = torch.zeros_like(scores) if wants_slope else None
    rejected = torch.zeros_like(weights)
    for temperature in _TEMPERATURES:
        p = (wanted / temperature).softmax(-1)
        logits = scores / temperature
        q = logits.softmax(-1)
        less = p - q
        # The sum of the minima is one less half of the differences.
        rejected += less.norm(p=1, dim=-1) * weights / 2
        if slope is not None:
            # Raising q where it is below p raises the sum of the minima.
            below = q * (less > 0)
            share = below.sum(-1, keepdim=True)
            change = torch.addcmul(below, share, q, value=-1)
            slope.sub_(change.mul_((weights / temperature)[:, None]))
    # The cross-entropy, at the last of the temperatures; log q = logits - (largest - log q there).
    offset = logits.amax(-1) - q.amax(-1).log()
    entropy = offset - torch.linalg.vecdot(p, logits)
    lost = rejected.sum() + entropy.dot(rejected)
    if slope is not None:
        slope.sub_(less.mul_((rejected / temperature)[:, None]))
    return lost, slope


def draft_loss(
    states: Tensor,
    weights: Tensor,
    rows: Tensor,
    output: Tensor,
    trunk_output: Tensor,
    teacher: Tensor,
) -> Tensor:
    """The weighted sum of the losses of drafts.

    states: [n, C], the block's output for n drafts. weights: [n]. rows: [n], in rising order: which
    row of `teacher` a draft should agree with. output, trunk_output: [V, C], rows of the draft
    vocabulary in the outputs of block and trunk, in the type of the products. teacher: [N, C],
    states of the trunk.
    """
    loss: Tensor = _DraftLoss.apply(states, weights, rows, output, trunk_output, teacher)
    return loss
