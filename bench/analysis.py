"""What limits drafting here: the speed with free drafts, how close it comes, and the bottleneck."""

from collections.abc import Sequence

from mtp_gguf.gguf_tools.profile import AUTO, impossible_speed

from .result import ALL, LOOKUP, Analysis, BenchResult, TextResult, pairs_of

# A smaller gain counts as none: runs on a quiet machine differ by about as much.
LEAST_GAIN = 0.03
# A batch that takes less than this share of the time of one token is no noise of a quiet machine.
_LEAST_BATCH = 0.9


def best_drafting(texts: Sequence[TextResult]) -> TextResult | None:
    """The fastest fixed depth above 0 over all texts, or None."""
    drafting = [t for t in texts if t.kind == ALL and t.depth and isinstance(t.depth, int)]
    return max(drafting, key=lambda t: t.tok_s.median, default=None)


def analyze(texts: Sequence[TextResult], *, stock_kernels: bool = False) -> Analysis | None:
    """Analyze texts of one context and draft vocabulary.

    Returns None without a run at depth 0 or without a drafting one. stock_kernels: mention that
    faster kernels for small batches are available.
    """
    plain = next((t for t in texts if t.kind == ALL and t.depth == 0), None)
    best = best_drafting(texts)
    if plain is None or best is None:
        return None
    gain = best.tok_s.median / plain.tok_s.median
    speedups = _speedups(best, plain)
    bottleneck = max(speedups, key=lambda name: speedups[name])
    auto = next((t for t in texts if t.kind == ALL and t.depth == AUTO), None)
    of_auto = None if auto is None else auto.tok_s.median / plain.tok_s.median
    return Analysis(
        best.depth if gain >= 1 + LEAST_GAIN else 0,
        best.depth,
        plain.tok_s.median,
        best.tok_s.median,
        gain,
        best.limit_tok_s,
        best.tok_s.median / max(best.limit_tok_s, 1e-9),
        speedups,
        bottleneck,
        f"{_gain_clause(best, gain, of_auto)}; "
        f"{_bottleneck_clause(bottleneck, best, plain, stock_kernels)}",
    )


def _cycle_ms(text: TextResult) -> float:
    return text.draft_ms + text.verify_ms + text.rollback_ms + text.rest_ms


def _speedups(best: TextResult, plain: TextResult) -> dict[str, float]:
    """At least 1: nothing becomes slower when it costs less, whatever noise says."""
    cycle = _cycle_ms(best)
    speedups = {
        "verification": cycle / max(cycle - best.verify_ms + plain.verify_ms, 1e-9),
        "drafting": cycle / max(cycle - best.draft_ms, 1e-9),
        "acceptance": (int(best.depth) + 1) / best.tokens_per_cycle,
    }
    return {name: max(times, 1.0) for name, times in speedups.items()}


def sentence_of(result: BenchResult) -> str:
    """Return what drafting gains, in a sentence; of drafts from the text if no head drafted."""
    if result.analysis:
        return result.analysis.sentence
    first = [(LOOKUP, text.context) for text in result.texts[:1]]
    found = [pair for pair in pairs_of(result) if (pair.depth, pair.context) in first]
    gains = {pair.kind: pair.ratio for pair in found}
    whole = gains.pop(ALL, None)
    if whole is None:
        return ""
    least, most = min(gains, key=gains.__getitem__), max(gains, key=gains.__getitem__)
    between = f", from {gains[least]:.2f} ({least}) to {gains[most]:.2f} ({most})"
    return (
        f"drafts from the text are {whole:.2f} times as fast as no drafting"
        f"{between if least != most else ''}."
    )


def contradictions(texts: Sequence[TextResult]) -> list[str]:
    """A sentence for each result that cannot be: only other programs can have caused it."""
    found = []
    plains = {t.context: t for t in texts if t.kind == ALL and t.depth == 0}
    for text in texts:
        plain = plains.get(text.context)
        if text.kind != ALL or plain is None or text.depth == 0:
            continue
        times = text.tok_s.median / plain.tok_s.median
        if impossible := impossible_speed(text.depth, times):
            found.append(impossible)
        if isinstance(text.depth, int) and text.verify_ms < _LEAST_BATCH * plain.verify_ms:
            found.append(
                f"a batch of {text.depth + 1} tokens took {text.verify_ms / plain.verify_ms:.2f} "
                "times as long as one token, and cannot take less"
            )
    return found


def _gain_clause(best: TextResult, gain: float, of_auto: float | None) -> str:
    """What drafting gains at the best fixed depth and at depth auto."""
    auto = "" if of_auto is None else f" (depth auto, the default: {of_auto:.2f} times)"
    if gain >= 1 + LEAST_GAIN:
        return f"depth {best.depth} is {gain:.2f} times as fast as no drafting{auto}"
    if of_auto is not None and of_auto >= 1 + LEAST_GAIN:
        return (
            f"depth auto, the default, is {of_auto:.2f} times as fast as no drafting (depth "
            f"{best.depth}, the best fixed one: {gain:.2f} times)"
        )
    if max(gain, of_auto or 0.0) > 1:
        return f"drafting gains less than {LEAST_GAIN:.0%} here{auto}"
    return f"drafting loses here: depth {best.depth} runs at {gain:.2f} times no drafting{auto}"


def _bottleneck_clause(
    bottleneck: str, best: TextResult, plain: TextResult, stock_kernels: bool
) -> str:
    batch = int(best.depth) + 1
    if bottleneck == "verification":
        hint = "; the patched libraries (mtp-gguf build-server) make it cheaper"
        return (
            f"the bottleneck is verification: a batch of {batch} tokens costs "
            f"{best.verify_ms / max(plain.verify_ms, 1e-9):.1f} times one token"
            f"{hint if stock_kernels else ''}."
        )
    if bottleneck == "drafting":
        return (
            f"the bottleneck is drafting: it takes {best.draft_ms / _cycle_ms(best):.0%} of each "
            "cycle; a smaller draft vocabulary (FastMTP) makes it cheaper."
        )
    first = f"{best.acceptance[0]:.0%} of the first drafts" if best.acceptance else "no drafts"
    return (
        f"the bottleneck is acceptance: {first} are accepted, and a cycle yields "
        f"{best.tokens_per_cycle:.2f} of {batch} possible tokens."
    )
