"""Real generation, greedy: speed, acceptance, and who wrote each token."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from mtp_gguf.native.checkpoint import Checkpoint
from mtp_gguf.native.session import Depth, MtpStats, Session

from .model import BenchModel


@dataclass(frozen=True)
class Written:
    """What one prompt gave: its tokens, the seconds after the prompt, what the cycles did."""

    tokens: tuple[int, ...]
    seconds: float
    stats: MtpStats


@dataclass(frozen=True)
class TracedToken:
    """A token of the answer.

    origin: 0 the trunk's, i the i-th draft's. rejected: the draft that stood in its place and was
    wrong; None where there was none.
    """

    token: int
    origin: int
    rejected: int | None = None


def write(
    model: BenchModel,
    session: Session,
    prompt: Sequence[int],
    n: int,
    depth: Depth,
    before: Checkpoint | None = None,
) -> Written:
    """Up to n tokens after the prompt, the first of them not counted in the time.

    before: what the prompt stands behind. Ends where the model ends its turn or the context ends.
    """
    _begin(session, prompt, before)
    token = session.argmax()
    session.reset_stats()
    tokens = [token]
    n = min(n, model.n_ctx - session.length())
    began = perf_counter()
    while len(tokens) < n and not model.is_end(tokens[-1]):
        new = session.step(tokens[-1], depth)
        end = next((i for i, token in enumerate(new) if model.is_end(token)), len(new) - 1)
        tokens += new[: end + 1]
    return Written(tuple(tokens), perf_counter() - began, session.stats())


def _begin(session: Session, prompt: Sequence[int], before: Checkpoint | None) -> None:
    session.remove(0)
    if before:
        session.restore(before)
    session.decode(prompt)


def trace(
    model: BenchModel,
    session: Session,
    prompt: Sequence[int],
    n: int,
    depth: Depth,
    before: Checkpoint | None = None,
) -> list[TracedToken]:
    """The same with the drafts kept: who wrote each token, and what was rejected for it."""
    _begin(session, prompt, before)
    out = [TracedToken(session.argmax(), 0)]
    n = min(n, model.n_ctx - session.length())
    while len(out) < n and not model.is_end(out[-1].token):
        drafts = session.begin(out[-1].token, depth)
        accepted = 0
        while True:
            token = session.argmax(session.row(accepted))
            if accepted == len(drafts) or token != drafts[accepted]:
                break
            accepted += 1
            out.append(TracedToken(token, accepted))
        session.end(accepted)
        rejected = drafts[accepted] if accepted < len(drafts) else None
        out.append(TracedToken(token, 0, rejected))
    return out[:n]
