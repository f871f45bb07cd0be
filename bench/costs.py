"""What the parts of a cycle cost: trunk batches, draft chains, rollback, prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mtp_gguf.native.checkpoint import Checkpoint

from .model import BenchModel, Setting
from .spread import Spread, spread
from .turns import rotated

PREFILL_TOKENS = 512


@dataclass(frozen=True)
class CycleCosts:
    """Milliseconds at some length of context.

    verify[i]: a trunk batch of i + 1 tokens with all logits. draft[i]: a chain of i + 1 drafts
    after one fed row. rollback: of rejected drafts.
    """

    context: int
    verify: tuple[Spread, ...]
    draft: tuple[Spread, ...]
    rollback: Spread


@dataclass(frozen=True)
class PrefillCosts:
    """Milliseconds of a prompt: alone without a head, and trunk and head where there is one."""

    tokens: int
    plain: Spread
    trunk: Spread
    head: Spread


def cycle_costs(
    model: BenchModel,
    setting: Setting,
    prompt: Sequence[int],
    *,
    blocks: int,
    cycles: int = 3,
    before: Checkpoint | None = None,
    one_context: bool = False,
    step: Callable[[], None] = lambda: None,
) -> CycleCosts:
    """Cycles of every depth up to the setting's in turn, all drafts rejected, after a prompt.

    Real cycles of real sessions, each with the snapshots that its depth needs, so that what is
    measured is what generating at that depth pays; one_context: with those of the deepest, as depth
    auto has them. In every block each depth has its turn of a cycle that warms up and `cycles` that
    count. before: what the prompt stands behind; the context named in the result is both. step:
    called after each block.
    """
    depths = range(setting.max_depth + 1)
    verify: list[list[float]] = [[] for _ in depths]
    draft: list[list[float]] = [[] for _ in depths]
    rollback: list[float] = []
    for block in range(blocks):
        for depth in rotated(depths, block):
            deepest = setting.max_depth if one_context else depth
            with model.session(replace(setting, max_depth=deepest)) as session:
                if before:
                    session.restore(before)
                session.decode(prompt)
                token = session.argmax()
                was = session.stats()
                undone = 0  # drafts whose rollback is in the next cycle's time
                for i in range(cycles + 1):
                    n = len(session.begin(token, depth))
                    token = session.argmax(session.row(0))
                    session.end(0)
                    now = session.stats()
                    if i:
                        verify[n].append(now.verify_ms - was.verify_ms)
                        if n:
                            draft[n].append(now.draft_ms - was.draft_ms)
                        if undone:
                            rollback.append(now.rollback_ms - was.rollback_ms)
                    undone, was = n, now
        step()
    return CycleCosts(
        len(prompt) + (before.length if before else 0),
        tuple(spread(values) for values in verify if values),
        tuple(spread(values) for values in draft if values),
        spread(rollback or [0.0]),
    )


def prefill_costs(
    model: BenchModel,
    setting: Setting,
    prompt: Sequence[int],
    rounds: int,
    step: Callable[[], None],
) -> PrefillCosts:
    """The prompt without and with a head, in turn; the first round is not counted."""
    plain: list[float] = []
    trunk: list[float] = []
    head: list[float] = []
    without = Setting(0, rollback=setting.rollback)
    for i in range(rounds + 1):
        for now in rotated((without, setting), i):
            with model.session(now) as session:
                session.decode(prompt)
                did = session.stats()
            if i == 0:
                continue
            if now is without:
                plain.append(did.prefill_ms)
            else:
                trunk.append(did.prefill_ms)
                head.append(did.prefill_head_ms)
        step()
    return PrefillCosts(len(prompt), spread(plain), spread(trunk), spread(head))
