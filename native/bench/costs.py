"""What the parts of a cycle cost: trunk batches, draft chains, rollback, prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .model import BenchModel, Setting
from .spread import Spread, spread

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
    rounds: int,
    step: Callable[[], None],
) -> CycleCosts:
    """Decode the prompt, then cycles of every depth in turn, all drafts rejected.

    Real cycles of a real session, so that what is measured is what generating pays. step: called
    after each round; the first one warms up and is not counted.
    """
    depths = range(setting.max_depth + 1)
    verify: list[list[float]] = [[] for _ in depths]
    draft: list[list[float]] = [[] for _ in depths]
    rollback: list[float] = []
    with model.session(setting) as session:
        session.decode(prompt)
        token = session.argmax()
        before = session.stats()
        undone = 0  # drafts whose rollback is in the next cycle's time
        for i in range(rounds + 1):
            for depth in depths:
                n = len(session.begin(token, depth))
                following = session.argmax(session.row(0))
                session.end(0)
                now = session.stats()
                if i:
                    verify[n].append(now.verify_ms - before.verify_ms)
                    if n:
                        draft[n].append(now.draft_ms - before.draft_ms)
                    if undone:
                        rollback.append(now.rollback_ms - before.rollback_ms)
                undone, before, token = n, now, following
            step()
    return CycleCosts(
        len(prompt),
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
        for now in (without, setting):
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
