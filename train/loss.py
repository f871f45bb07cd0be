"""Cross-entropy of drafts with the trunk's own distribution over the draft vocabulary.

The trunk's logits are its output matrix times the states on disk, so no logits are stored. Rows go
through in slices, and the gradient is formed in the same walk: the logits of a batch over a large
vocabulary would take gigabytes.
"""

from typing import Any

import torch
from torch import Tensor

_ROWS_AT_ONCE = 256
# The share of the target that is the trunk's most likely token alone: greedy verification accepts
# only that. In case b of benchmarks/train_head.py, a share of 0 loses 5 points of the third draft
# greedily and gains nothing at temperature 0.8 (60,000 tokens).
_GREEDY_SHARE = 0.2


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weights: Tensor, output: Tensor, teacher: Tensor, log_sum: Tensor
    ) -> Tensor:
        total = torch.zeros((), device=states.device)
        gradient = torch.empty_like(states)
        for at in range(0, len(teacher), _ROWS_AT_ONCE):
            rows = slice(at, at + _ROWS_AT_ONCE)
            wanted = (teacher[rows].to(output.dtype) @ output.T).float()
            best = wanted.argmax(-1, keepdim=True)
            within = wanted.logsumexp(-1, keepdim=True)
            # Rows count by the trunk's probability that any token of the vocabulary is next.
            share = (within - log_sum[rows, None]).clamp_max(0).exp()
            target = (wanted - within).exp_().mul_(1 - _GREEDY_SHARE)
            target.scatter_add_(1, best, torch.full_like(within, _GREEDY_SHARE))
            for step, state in enumerate(states):
                weight = weights[step, rows, None] * share
                logits = (state[rows].to(output.dtype) @ output.T).float()
                log_shares = logits.sub_(logits.logsumexp(-1, keepdim=True))
                total -= torch.linalg.vecdot(log_shares, target).dot(weight[:, 0])
                slope = log_shares.exp_().sub_(target).mul_(weight).to(output.dtype)
                gradient[step, rows] = (slope @ output).to(states.dtype)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0], None, None, None, None


def draft_loss(
    states: Tensor, weights: Tensor, output: Tensor, teacher: Tensor, log_sum: Tensor
) -> Tensor:
    """The weighted sum of the cross-entropies in nats.

    states: [steps, N, C], the block's output in each step; N rows that predict the same tokens.
    weights: [steps, N]. output: [V, C], the output's rows of the draft vocabulary, in the type of
    the products. teacher: [N, C], the trunk's states that predict these tokens. log_sum: [N], the
    logarithms of the sums of its exponentiated logits over its whole vocabulary.
    """
    loss: Tensor = _DraftLoss.apply(states, weights, output, teacher, log_sum)
    return loss
