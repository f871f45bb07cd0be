"""What is measured in the time that there is. Knows no model and no clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Amount:
    """How much is written. prompts: of each kind; tokens: of each answer; rounds: of everything."""

    prompts: int
    tokens: int
    rounds: int


FULL = Amount(3, 128, 3)
# The last of these still has a spread and texts longer than their beginnings; below it parts are
# left out first, and only then is less written.
_ENOUGH = (FULL, Amount(2, 128, 3), Amount(1, 128, 3), Amount(1, 96, 3), Amount(1, 64, 3))
_LITTLE = (Amount(1, 48, 2), Amount(1, 32, 2), Amount(1, 24, 1))


@dataclass(frozen=True)
class Wish:
    """A part that could be measured.

    key: how the one who measures knows it. group, member: what a line of the plan calls it and
    its like. seconds: about, at an amount. needed: not left out, whatever the time.
    """

    key: Hashable
    group: str
    member: str
    seconds: Callable[[Amount], float]
    needed: bool = False


@dataclass(frozen=True)
class Plan:
    """wishes: all of them, what matters most first. whole: seconds of them in full."""

    amount: Amount
    wishes: tuple[Wish, ...]
    kept: tuple[Wish, ...]
    whole: float

    @property
    def left_out(self) -> tuple[Wish, ...]:
        """What there is no time for."""
        return tuple(wish for wish in self.wishes if wish not in self.kept)

    @property
    def seconds(self) -> float:
        """About how long it takes."""
        return _sum(self.kept, self.amount)

    def has(self, key: Hashable) -> bool:
        """Whether a part is to be measured."""
        return any(wish.key == key for wish in self.kept)

    def lines(self, wishes: Sequence[Wish]) -> list[tuple[str, float]]:
        """What is to be said of some of the wishes, and seconds: a line for each group."""
        groups: dict[str, list[Wish]] = {}
        for wish in wishes:
            groups.setdefault(wish.group, []).append(wish)
        return [
            (
                f"{group}: {', '.join(named)}"
                if (named := [w.member for w in same if w.member])
                else group,
                _sum(same, self.amount),
            )
            for group, same in groups.items()
        ]

    def adjust(self, done: Collection[Hashable], seconds: float) -> Plan:
        """The plan where so many seconds are left for the parts that are not done.

        Parts go where the time got short, and come back where it did not.
        """
        ahead = [wish for wish in self.wishes if wish.key not in done]
        fitting = _greedy(ahead, self.amount, seconds)
        kept = [wish for wish in self.wishes if wish.key in done or wish in fitting]
        return replace(self, kept=tuple(kept))


def fit(
    wishes: Sequence[Wish],
    budget: float | None,
    *,
    prompts: int | None = None,
    tokens: int | None = None,
    rounds: int | None = None,
) -> Plan:
    """The best plan for a budget in seconds; None: everything in full.

    wishes: what matters most first. prompts, tokens, rounds: of the amount, where not to be chosen.
    As much text as fits with all wishes; where even little text of each is too long, wishes are
    left out from the end, needed ones never.
    """

    def asked(amount: Amount) -> Amount:
        return Amount(prompts or amount.prompts, tokens or amount.tokens, rounds or amount.rounds)

    whole = _sum(wishes, asked(FULL))
    if budget is None or whole <= budget:
        return Plan(asked(FULL), tuple(wishes), tuple(wishes), whole)
    for amount in map(asked, _ENOUGH):
        if _sum(wishes, amount) <= budget:
            return Plan(amount, tuple(wishes), tuple(wishes), whole)
    needed = [wish for wish in wishes if wish.needed]
    amounts = [asked(a) for a in (_ENOUGH[-1], *_LITTLE)]
    amount = next((a for a in amounts if _sum(needed, a) <= budget), amounts[-1])
    kept = _greedy(wishes, amount, budget)
    return Plan(amount, tuple(wishes), tuple(kept), whole)


def _greedy(wishes: Sequence[Wish], amount: Amount, seconds: float) -> list[Wish]:
    """What is needed, and of the rest, in its order, what still fits."""
    left = seconds - _sum([wish for wish in wishes if wish.needed], amount)
    kept = []
    for wish in wishes:
        if not wish.needed:
            if (takes := wish.seconds(amount)) > left:
                continue
            left -= takes
        kept.append(wish)
    return kept


def _sum(wishes: Sequence[Wish], amount: Amount) -> float:
    return sum(wish.seconds(amount) for wish in wishes)
