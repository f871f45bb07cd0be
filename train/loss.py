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

# Logits of a slice: with 32,768 tokens this is 1.7 times as fast on a CPU as slices of 256 rows,
# because a slice stays in its caches. A GPU needs more to do at once.
_LOGITS_AT_ONCE, _LOGITS_AT_ONCE_ON_GPU = 1 << 21, 1 << 25
_TEMPERATURES = (0.3, 0.8)


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weights: Tensor, output: Tensor, teacher: Tensor
    ) -> Tensor:
        total = torch.zeros((), device=states.device)
        # Half of the work, which measuring does without.
        gradient = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        on_cpu = states.device.type == "cpu"
        size = max(1, (_LOGITS_AT_ONCE if on_cpu else _LOGITS_AT_ONCE_ON_GPU) // len(output))
        for at in range(0, len(teacher), size):
            rows = slice(at, at + size)
            wanted = (teacher[rows].to(output.dtype) @ output.T).float()
            targets = [(wanted / t).softmax(-1) for t in _TEMPERATURES]
            # One product for all steps; the slope of each logit then takes its place.
            scores = states[:, rows].to(output.dtype) @ output.T
            for step, score in enumerate(scores):
                weight = weights[step, rows] / len(_TEMPERATURES)
                logits = score.float()
                slope, rejected = torch.zeros_like(logits), torch.zeros_like(weight)
                for temperature, p in zip(_TEMPERATURES, targets, strict=True):
                    q = (logits / temperature).softmax(-1)
                    rejected += (1 - torch.minimum(p, q).sum(-1)) * weight
                    if gradient is not None:
                        # Raising q where it is below p raises the sum of the minima.
                        below = q * (q < p)
                        change = below.sum(-1, keepdim=True) * q - below
                        slope += change.mul_((weight / temperature)[:, None])
                total += rejected.sum()
                # The cross-entropy, at the last of the temperatures.
                log_q = (logits / temperature).log_softmax(-1)
                total -= torch.linalg.vecdot(log_q, p).dot(rejected)
                if gradient is not None:
                    slope += (q - p).mul_((rejected / temperature)[:, None])
                    score.copy_(slope)
            if gradient is not None:
                gradient[:, rows] = (scores @ output).to(states.dtype)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None, None


def draft_loss(states: Tensor, weights: Tensor, output: Tensor, teacher: Tensor) -> Tensor:
    """The weighted sum of the losses of drafts.

    states: [steps, N, C], the block's output in each step; N rows that predict the same tokens.
    weights: [steps, N]. output: [V, C], the output's rows of the draft vocabulary, in the type of
    the products. teacher: [N, C], the trunk's states that predict these tokens.
    """
    loss: Tensor = _DraftLoss.apply(states, weights, output, teacher)
    return loss
