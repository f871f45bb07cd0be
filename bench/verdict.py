"""What the numbers say: the limit, the share of it that is reached, and what holds it back."""

from collections.abc import Sequence
from dataclasses import dataclass

from mtp_gguf.gguf_tools.profile import AUTO

from .result import ALL, TextResult

# Below this drafting counts as no gain: as much as runs on a quiet machine differ by.
LEAST_GAIN = 0.03


@dataclass(frozen=True)
class Verdict:
    """The limit, and how near drafting comes to it.

    best: the depth that was fastest, 0 for no drafting. gain: of the best drafting depth over no
    drafting, 1.0 for none. limit_tok_s: what that depth would give if drafts were free. without:
    how many times as fast it would be without the price of verification (several tokens for that
    of one), of drafting (drafts for nothing), of acceptance (all drafts right).
    """

    best: int | str
    best_drafting: int | str | None
    plain_tok_s: float
    tok_s: float
    gain: float
    limit_tok_s: float
    share_reached: float
    without: dict[str, float]
    sentence: str


def best_drafting(texts: Sequence[TextResult]) -> TextResult | None:
    """The fastest drafting depth that is a number, over all texts; None where there is none."""
    drafting = [t for t in texts if t.kind == ALL and t.depth not in (0, AUTO)]
    return max(drafting, key=lambda t: t.tok_s.median, default=None)


def judge(texts: Sequence[TextResult], *, slow_kernels: bool = False) -> Verdict | None:
    """The verdict on texts of one context and draft vocabulary.

    slow_kernels: there are faster ones for small batches to be had. None where no drafting depth,
    or no plain run, is among the texts.
    """
    plain = next((t for t in texts if t.kind == ALL and t.depth == 0), None)
    best = best_drafting(texts)
    if plain is None or best is None:
        return None
    gain = best.tok_s.median / plain.tok_s.median
    without = _without(best, plain)
    sentence = _sentence(best, plain, gain, without, slow_kernels)
    return Verdict(
        best.depth if gain >= 1 + LEAST_GAIN else 0,
        best.depth,
        plain.tok_s.median,
        best.tok_s.median,
        gain,
        best.limit_tok_s,
        best.tok_s.median / max(best.limit_tok_s, 1e-9),
        without,
        sentence,
    )


def _without(best: TextResult, plain: TextResult) -> dict[str, float]:
    cycle = best.draft_ms + best.verify_ms + best.rollback_ms + best.rest_ms
    return {
        "verification": cycle / max(cycle - best.verify_ms + plain.verify_ms, 1e-9),
        "drafting": cycle / max(cycle - best.draft_ms, 1e-9),
        "acceptance": (int(best.depth) + 1) / best.tokens_per_cycle,
    }


def _sentence(
    best: TextResult,
    plain: TextResult,
    gain: float,
    without: dict[str, float],
    slow_kernels: bool,
) -> str:
    """Which of the prices of drafting, taken away, would speed this depth up most."""
    depth = int(best.depth)
    cycle = best.draft_ms + best.verify_ms + best.rollback_ms + best.rest_ms
    one = plain.verify_ms
    worst = max(without, key=lambda name: without[name])
    first = f"{best.acceptance[0]:.0%} of the first drafts" if best.acceptance else "no draft"
    reasons = {
        "verification": (
            f"verification holds it back: a batch of {depth + 1} tokens costs "
            f"{best.verify_ms / max(one, 1e-9):.1f} times one"
            + ("; the kernels of `mtp-gguf build-server` make it cheaper" if slow_kernels else "")
        ),
        "drafting": (
            f"drafting holds it back: it takes {best.draft_ms / cycle:.0%} of each cycle; "
            "a smaller draft vocabulary (FastMTP) makes it cheaper"
        ),
        "acceptance": (
            f"acceptance holds it back: {first} are right, {best.tokens_per_cycle:.2f} tokens "
            f"come of {depth + 1} possible in a cycle"
        ),
    }
    if gain >= 1 + LEAST_GAIN:
        begin = f"depth {depth} is {gain:.2f} times as fast as no drafting; "
    elif gain > 1:
        begin = f"drafting gains less than {LEAST_GAIN:.0%} here; "
    else:
        begin = f"drafting loses here: depth {depth} runs at {gain:.2f} times no drafting; "
    return begin + reasons[worst] + "."
