"""Measure what drafts cost with a head in several types, and how many are accepted."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.json_text import parse_json

from ..llama.mtp_llama import MTPLlama
from ..session import Session
from .acceptance import accepted_drafts, places_of
from .head_types import DEPTH, STORED, TYPES, MeasuredType
from .subprocesses import print_found

_CHAINS = 10  # of each passage
_SECONDS = 60.0


def measure_types(
    llm: MTPLlama, types: Sequence[str] = TYPES, seconds: float = _SECONDS
) -> tuple[MeasuredType, ...]:
    """Measure the head of a model as it is stored, and in each type.

    llm: drafts `DEPTH` tokens without drafts from the text; it cannot be used afterwards.
    """
    if llm.head is None:
        raise RequestError("drafting is switched off by MTP_GGUF_DISABLE")
    names: tuple[str, ...] = (STORED, *types)
    heads = [llm._open_head(None if name == STORED else name) for name in names]
    depth = min(DEPTH, llm.head.max_depth)
    counts = [[0, 0] for _ in names]  # chains, and accepted drafts
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in names]
    llm.session.close()
    began = perf_counter()
    try:
        for number, (prompt, places) in enumerate(places_of(llm)):
            if number and perf_counter() - began > seconds:
                break
            for place in range(len(names)):
                at = (place + number) % len(names)
                with llm._open_session(heads[at], depth) as session:
                    session.set_sampling(1.0, seed=number)
                    session.decode(prompt)
                    for chain, token in enumerate(places[:_CHAINS]):
                        counts[at][0] += 1
                        counts[at][1] += _timed(session, token, depth, chain % 2 == 1, times[at])
                    session.remove(0)  # the context is that of all sessions
    finally:
        for head in heads:
            head.close()
    return tuple(
        MeasuredType(name, chains, accepted, _quartile(draft), _quartile(verify))
        for name, (chains, accepted), (draft, verify) in zip(names, counts, times, strict=True)
    )


def _quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 4]


def _timed(
    session: Session, token: int, depth: int, sampled: bool, times: tuple[list[float], list[float]]
) -> int:
    """Append a token; note the times of drafting and verifying, and return the accepted drafts."""
    before = session.stats()
    accepted = accepted_drafts(session, token, depth, sampled=sampled)
    after = session.stats()
    times[0].append(after.draft_ms - before.draft_ms)
    times[1].append(after.verify_ms - before.verify_ms)
    return accepted


def _measure() -> list[dict[str, Any]]:
    options = parse_json(sys.argv[2])
    with MTPLlama(
        sys.argv[1], depth=DEPTH, lookup=False, profile=False, n_ctx=512, **options
    ) as llm:
        return [asdict(measured) for measured in measure_types(llm)]


if __name__ == "__main__":
    sys.exit(print_found(_measure))
