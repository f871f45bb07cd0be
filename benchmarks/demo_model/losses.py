"""Cross entropy against tokens or against a teacher, fused with the output matrix.

A small model on a CPU is bound by its logits: 8192 rows of 4096 scores are 128 MiB, walked several
times. Here rows go through in slices that fit the cache, and the gradients of state and matrix are
formed in the same walk, so no tensor of that size ever exists.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ROWS_AT_ONCE = 512


def target_rows(
    target: Tensor, weight: Tensor, rows: slice, sharpness: float
) -> tuple[Tensor | None, Tensor | None]:
    """(token ids (n,), probabilities (n, V)) of a slice; ids alone when `target` holds tokens."""
    if target.dim() == 1:
        return target[rows], None
    scores = (target[rows] @ weight.T).float()
    ids = scores.argmax(dim=-1) if sharpness > 0 else None
    return ids, torch.softmax(scores, dim=-1)


class _OutputLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        state: Tensor,
        weight: Tensor,
        target: Tensor,
        sharpness: float,
        dtype: torch.dtype,
    ) -> Tensor:
        count = state.shape[0]
        low_state, low_weight = state.to(dtype), weight.to(dtype)
        low_target = target.to(dtype) if target.dim() == 2 else target
        state_grad = torch.empty_like(low_state)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
        loss = torch.zeros(())
        for start in range(0, count, ROWS_AT_ONCE):
            rows = slice(start, min(start + ROWS_AT_ONCE, count))
            ids, soft = target_rows(low_target, low_weight, rows, sharpness)
            share = 1.0 if soft is None else sharpness
            scores = (low_state[rows] @ low_weight.T).float()
            norm = torch.logsumexp(scores, dim=-1, keepdim=True)
            loss += norm.sum()
            if ids is not None:
                loss -= share * scores.gather(1, ids[:, None]).sum()
            if soft is not None:
                loss -= (1 - share) * torch.dot(scores.flatten(), soft.flatten())
            gradient = scores.sub_(norm).exp_()
            if soft is not None:
                gradient.sub_(soft, alpha=1 - share)
            if ids is not None:
                gradient[torch.arange(len(ids)), ids] -= share
            low_gradient = gradient.to(dtype)
            state_grad[rows] = low_gradient @ low_weight
            if weight.requires_grad:
                weight_grad += low_gradient.T @ low_state[rows]
        ctx.save_for_backward(state_grad.to(state.dtype), weight_grad)
        ctx.count = count
        return loss / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        state_grad, weight_grad = ctx.saved_tensors
        scale = grad / ctx.count
        needs_weight = ctx.needs_input_grad[1]
        return state_grad * scale, weight_grad * scale if needs_weight else None, None, None, None


def output_loss(
    state: Tensor,
    weight: Tensor,
    target: Tensor,
    sharpness: float = 0.0,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Mean cross entropy in nats of softmax(state @ weight.T).

    state: (N, C); weight: (V, C); target: token ids (N,), or the teacher's states (N, C), which
    give softmax(target @ weight.T) without any gradient. Of a teacher's target, the share
    `sharpness` is its most likely token alone. Products run in `dtype`.
    """
    loss: Tensor = _OutputLoss.apply(state, weight, target.detach(), sharpness, dtype)  # type: ignore[no-untyped-call]
    return loss


@torch.no_grad()
def compare(state: Tensor, weight: Tensor, teacher: Tensor) -> tuple[float, float]:
    """(share of rows where both pick the same token, teacher's mean probability of that pick)."""
    same = probability = 0.0
    for start in range(0, state.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        pick = (state[rows].float() @ weight.T).argmax(dim=-1)
        scores = teacher[rows].float() @ weight.T
        same += float((pick == scores.argmax(dim=-1)).sum())
        probability += float(torch.softmax(scores, -1).gather(1, pick[:, None]).sum())
    return same / state.shape[0], probability / state.shape[0]
