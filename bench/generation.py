"""Greedy generation as users run it: speed, acceptance, and the source of each token."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from mtp_gguf.native.checkpoint import Checkpoint
from mtp_gguf.native.session import Depth, MtpStats, Session

from .model import BenchModel


@dataclass(frozen=True)
class Generation:
    """The answer to one prompt. seconds: without the prompt. stats: the session's counters."""

    tokens: tuple[int, ...]
    seconds: float
    stats: MtpStats


@dataclass(frozen=True)
class TracedToken:
    """One token of an answer.

    origin: 0 if sampled from the trunk, i for the i-th draft of a chain, -1 for a draft from the
    text. rejected: the wrong draft that this token replaced, or None.
    """

    token: int
    origin: int
    rejected: int | None = None


def generate(
    model: BenchModel,
    session: Session,
    prompt: Sequence[int],
    n: int,
    depth: Depth,
    prefix: Checkpoint | None = None,
) -> Generation:
    """Generate up to n tokens after the prompt; the first one is not part of the measured time.

    prefix: context that comes before the prompt. Generation stops at an end-of-turn token and where
    the context is full.
    """
    _prefill(session, prompt, prefix)
    token = session.argmax()
    session.reset_stats()
    tokens = [token]
    n = min(n, model.n_ctx - session.length())
    start = perf_counter()
    while len(tokens) < n and not model.is_end(tokens[-1]):
        new = session.step(tokens[-1], depth)
        end = next((i for i, token in enumerate(new) if model.is_end(token)), len(new) - 1)
        tokens += new[: end + 1]
    return Generation(tuple(tokens), perf_counter() - start, session.stats())


def _prefill(session: Session, prompt: Sequence[int], prefix: Checkpoint | None) -> None:
    session.remove(0)
    if prefix:
        session.restore(prefix)
    session.decode(prompt)


def trace(
    model: BenchModel,
    session: Session,
    prompt: Sequence[int],
    n: int,
    depth: Depth,
    prefix: Checkpoint | None = None,
) -> list[TracedToken]:
    """Like `generate`, untimed: the source of each token and the draft that it replaced."""
    _prefill(session, prompt, prefix)
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
            out.append(TracedToken(token, session.origin(accepted)))
        session.end(accepted)
        rejected = drafts[accepted] if accepted < len(drafts) else None
        out.append(TracedToken(token, 0, rejected))
    return out[:n]
