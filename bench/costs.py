"""The cost of each part of a cycle: trunk batches, draft chains, rollback, prompts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

from mtp_gguf.native.checkpoint import Checkpoint

from .model import BenchModel, Setting
from .options import COST_DEPTH
from .result import CycleCosts, PrefillCosts
from .stats import rotated, summarize

PREFILL_TOKENS = 512


def cycle_costs(
    model: BenchModel,
    setting: Setting,
    prompt: Sequence[int],
    *,
    blocks: int,
    cycles: int = 3,
    prefix: Checkpoint | None = None,
    one_context: bool = False,
    step: Callable[[], None] = lambda: None,
) -> CycleCosts:
    """Measure cycles of every depth up to the setting's, interleaved, with all drafts rejected.

    With a depth of 0 no head drafts: then the trunk's batches are measured alone.

    Each depth runs in a session with the snapshots that this depth needs, so that its cost is what
    generating at that depth costs.

    Args:
        blocks: repetitions; in each, every depth runs one warm-up cycle and `cycles` timed ones.
        prefix: context that comes before the prompt; the `context` of the result is both together.
        one_context: give every depth the snapshots of the deepest, as depth auto has them.
        step: called after each block.

    """
    if setting.max_depth == 0:
        return _batch_costs(model, setting, prompt, blocks, cycles, prefix, step)
    depths = range(setting.max_depth + 1)
    verify: list[list[float]] = [[] for _ in depths]
    draft: list[list[float]] = [[] for _ in depths]
    rollback: list[float] = []
    for block in range(blocks):
        for depth in rotated(depths, block):
            deepest = setting.max_depth if one_context else depth
            with model.session(replace(setting, max_depth=deepest)) as session:
                if prefix:
                    session.restore(prefix)
                session.decode(prompt)
                token = session.argmax()
                before = session.stats()
                rejected = 0  # drafts whose rollback is part of the next cycle's time
                for i in range(cycles + 1):
                    n = len(session.begin(token, depth))
                    token = session.argmax(session.row(0))
                    session.end(0)
                    now = session.stats()
                    if i:
                        verify[n].append(now.verify_ms - before.verify_ms)
                        if n:
                            draft[n].append(now.draft_ms - before.draft_ms)
                        if rejected:
                            rollback.append(now.rollback_ms - before.rollback_ms)
                    rejected, before = n, now
        step()
    return CycleCosts(
        len(prompt) + (prefix.length if prefix else 0),
        tuple(summarize(values) for values in verify if values),
        tuple(summarize(values) for values in draft if values),
        summarize(rollback or [0.0]),
    )


def _batch_costs(
    model: BenchModel,
    setting: Setting,
    prompt: Sequence[int],
    blocks: int,
    cycles: int,
    prefix: Checkpoint | None,
    step: Callable[[], None],
) -> CycleCosts:
    """Measure batches of 1 to COST_DEPTH + 1 tokens, interleaved, after one round of warm-up."""
    sizes = range(1, COST_DEPTH + 2)
    times: list[list[float]] = [[] for _ in sizes]
    with model.session(setting) as session:
        for i in range(blocks * cycles + 1):
            for size in rotated(sizes, i):
                session.remove(0)
                if prefix:
                    session.restore(prefix)
                session.decode(prompt)
                batch = [session.argmax()] * size
                start = perf_counter()
                session.decode(batch, all_logits=True)
                if i:
                    times[size - 1].append((perf_counter() - start) * 1e3)
            if i and i % cycles == 0:
                step()
    length = len(prompt) + (prefix.length if prefix else 0)
    return CycleCosts(length, tuple(map(summarize, times)), (), summarize([0.0]))


def prefill_costs(
    model: BenchModel,
    setting: Setting,
    prompt: Sequence[int],
    rounds: int,
    step: Callable[[], None],
) -> PrefillCosts:
    """Measure a prompt without and with a head, interleaved, after one round of warm-up.

    setting: with the head; of depth 0 if there is none.
    """
    plain: list[float] = []
    trunk: list[float] = []
    head: list[float] = []
    without_head = Setting(0, rollback=setting.rollback)
    compared = (without_head, setting) if setting.max_depth else (without_head,)
    for i in range(rounds + 1):
        for current in rotated(compared, i):
            with model.session(current) as session:
                session.decode(prompt)
                stats = session.stats()
            if i == 0:
                continue
            if current is without_head:
                plain.append(stats.prefill_ms)
            else:
                trunk.append(stats.prefill_ms)
                head.append(stats.prefill_head_ms)
        step()
    of_head = [summarize(times) if times else None for times in (trunk, head)]
    return PrefillCosts(len(prompt), summarize(plain), *of_head)
