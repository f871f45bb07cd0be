"""Hold the hand-written parts of the training against slow and obvious versions of themselves.

python check.py        # a few seconds; ends with "all equal" or an AssertionError
"""

from __future__ import annotations

import torch
from losses import output_loss
from model import FAMILIES, DemoModel, make_config
from torch import Tensor
from torch.nn.functional import one_hot

# F32 sums in another order, relative to the largest value compared.
TOLERANCE = 2e-5


def close(name: str, found: Tensor, expected: Tensor) -> None:
    error = float((found - expected).abs().max() / expected.abs().max())
    print(f"{name}: largest difference {error:.1e} of the largest value")
    assert error < TOLERANCE, f"{name}: {error:.1e} is not below {TOLERANCE:.0e}"


def check_losses() -> None:
    """The fused loss and its gradients against the plain formula."""
    state = torch.randn(1000, 64, requires_grad=True)
    weight = (torch.randn(300, 64) / 8).requires_grad_()
    ids, teacher = torch.randint(0, 300, (1000,)), torch.randn(1000, 64)
    scores = (teacher @ weight.T).detach()
    best = one_hot(scores.argmax(dim=-1), 300)
    for name, target, sharpness, wanted in (
        ("tokens", ids, 0.0, one_hot(ids, 300).float()),
        ("teacher", teacher, 0.0, scores.softmax(-1)),
        ("sharpened teacher", teacher, 0.3, 0.7 * scores.softmax(-1) + 0.3 * best),
    ):
        found = output_loss(state, weight, target, sharpness, torch.float32)
        plain = -(wanted * (state @ weight.T).log_softmax(-1)).sum(-1).mean()
        close(f"loss on {name}", found, plain)
        for part, one, other in zip(
            ("state", "weight"),
            torch.autograd.grad(found, (state, weight)),
            torch.autograd.grad(plain, (state, weight)),
            strict=True,
        ):
            close(f"gradient of {part} on {name}", one, other)


class Cache:
    """A plain growing KV cache with the reference's `update`."""

    def __init__(self) -> None:
        self.key = self.value = torch.empty(0)

    def update(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        first = self.key.numel() == 0
        self.key = key if first else torch.cat((self.key, key), dim=2)
        self.value = value if first else torch.cat((self.value, value), dim=2)
        return self.key, self.value


@torch.no_grad()
def check_unrolling(family: str, steps: int = 3) -> None:
    """`draft_states` against a drafting engine: feed the known rows, then one row a step."""
    model = DemoModel(family, make_config(family, 512, pad=0, eos=[1])).eval()
    for parameter in model.mtp.parameters():
        if parameter.dim() >= 2:
            parameter.mul_(5)
    tokens = torch.randint(0, 512, (1, 12))
    embedding = model.trunk.model.embed_tokens(tokens)
    hidden = model.hidden(tokens)
    states = model.draft_states(hidden, tokens, steps)

    def run(state: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Rows for the tokens at `positions` through the MTP block, after those in `cache`."""
        head, rows = model.mtp, len(positions)
        fed = embedding[:, positions]
        axes = model.family.axes
        places = positions[None].expand(axes, 1, -1) if axes else positions[None]
        rope = model.trunk.model.rotary_emb(fed, places)
        past = cache.key.shape[2] if cache.key.numel() else 0
        mask = torch.ones(rows, past + rows, dtype=torch.bool).tril(past)[None, None]
        pair = torch.cat((head.pre_fc_norm_embedding(fed), head.pre_fc_norm_hidden(state)), dim=-1)
        out = head.layers[0](
            head.fc(pair), position_embeddings=rope, attention_mask=mask, past_key_values=cache
        )
        state = head.norm(out)
        assert isinstance(state, Tensor)
        return state

    for row in (0, 3, 8):
        cache = Cache()
        state = run(hidden[:, : row + 1], torch.arange(1, row + 2), cache)[:, -1:]
        for step in range(steps):
            if step > 0:
                state = run(state, torch.tensor([row + 1 + step]), cache)
            name = f"{family}, draft step {step + 1} from row {row}"
            close(name, states[step][:, row : row + 1], state)


if __name__ == "__main__":
    torch.manual_seed(1)
    check_losses()
    for family in FAMILIES:
        check_unrolling(family)
    print("all equal")
