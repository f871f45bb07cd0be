"""The acceptance rate of a file's head on a fixed text.

Chains of drafts begin at fixed places of a corpus that ships with the package. The trunk verifies
them as it does while it generates, and the text then goes on as it stands: repeated runs on one
machine give the same counts, and those of two heads are of the same places. Half of the chains are
verified greedily, the others by rejection sampling at temperature 1, with fixed seeds.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.json_text import parse_json
from mtp_gguf.gguf_tools.heads.acceptance import POSITIONS, Acceptance, Counts
from mtp_gguf.gguf_tools.model import shard_paths

from ..chat.generate import chat_writer
from .subprocesses import REFUSED, print_found, run_module

if TYPE_CHECKING:
    from ..llama.mtp_llama import MTPLlama
    from ..session import Session

_PROMPT = 12  # tokens of a passage before the first draft
_CHAINS = 20  # of each passage, at consecutive tokens
_LEAST_CHAINS = 16
_CONTEXT = 512
_MARK = "====="  # a line that begins a passage, or divides a message from its answer
# Memory besides the weights: context, compute buffers, llama.cpp and Python.
_OVERHEAD = 256 << 20
# The subprocess's time limit besides drafting: startup seconds, and bytes read per second.
_STARTING, _SLOW_DISK = 60.0, 50e6


@dataclass(frozen=True)
class Passage:
    """A part of the corpus. message: what the text answers to; empty if it answers to nothing."""

    kind: str
    message: str
    text: str


@dataclass(frozen=True)
class Measured(Acceptance):
    """What was counted, and the seconds that it took without loading."""

    seconds: float


def corpus() -> tuple[Passage, ...]:
    """Return the passages of the corpus that `CORPUS` and `CORPUS_VERSION` name."""
    file = resources.files("mtp_gguf.native") / "acceptance_corpus.txt"
    passages = []
    for part in file.read_text(encoding="utf-8").split(f"{_MARK} ")[1:]:
        kind, _, body = part.partition("\n")
        message, mark, answer = body.partition(f"{_MARK}\n")
        passages.append(Passage(kind, *((message.strip(), answer) if mark else ("", body))))
    return tuple(passages)


def memory_needed(path: Path) -> int:
    """Return the bytes of memory that measuring takes: the file's weights and overhead."""
    return sum(shard.stat().st_size for shard in shard_paths(path)) + _OVERHEAD


def measure_in_subprocess(
    path: Path,
    *,
    seconds: float = 60.0,
    whole_vocabulary: bool = False,
    head: Path | None = None,
    text: Path | None = None,
    drafts: int = _LEAST_CHAINS,
) -> Measured:
    """Run `measure_acceptance` in a subprocess, so that a file may crash llama.cpp.

    Raises RequestError if nothing can be measured, or if loading takes longer than it would from a
    slow disk.
    """
    options = {
        "seconds": seconds,
        "whole_vocabulary": whole_vocabulary,
        "head": None if head is None else str(head.absolute()),
        "text": None if text is None else text.read_text(encoding="utf-8"),
        "drafts": drafts,
    }
    limit = _STARTING + memory_needed(path) / _SLOW_DISK + 2 * seconds
    try:
        words = (str(path.absolute()), json.dumps(options))
        child = run_module("mtp_gguf.native.checks.acceptance", *words, timeout=limit)
    except subprocess.TimeoutExpired:
        raise RequestError(f"loading and drafting took longer than {limit:.0f} s") from None
    except OSError as error:
        raise RequestError(f"cannot start {sys.executable}: {error.strerror}") from None
    if child.returncode < 0:
        raise RequestError(f"llama.cpp crashed (signal {-child.returncode})")
    if child.returncode > 0:
        lines = child.stderr.strip().splitlines() or ["no reason given"]
        raise RequestError(lines[0] if child.returncode == REFUSED else lines[-1])
    found = parse_json(child.stdout.splitlines()[-1])
    counts = Acceptance.of(found)
    return Measured(counts.greedy, counts.sampled, found["seconds"])


def measure_acceptance(
    path: Path,
    *,
    seconds: float = 60.0,
    whole_vocabulary: bool = False,
    head: Path | str | None = None,
    text: str | None = None,
    drafts: int = _LEAST_CHAINS,
) -> Measured:
    """Load the model on the CPU and measure for at most `seconds`, not counting loading.

    At least sixteen chains are measured. whole_vocabulary: ignore the file's draft vocabulary
    (layout ids). head: a separate file with the head. text: in place of the corpus; then first
    drafts at its first `drafts` places are measured, greedily. Raises RequestError if nothing can
    be drafted, NativeError if llama.cpp or the head rejects the file.
    """
    from ..llama.mtp_llama import MTPLlama  # noqa: PLC0415  (loads llama.cpp)

    depth = POSITIONS if text is None else 1
    with MTPLlama(
        str(path),
        mtp_head=None if head is None else str(head),
        depth=depth,
        lookup=False,
        profile=False,
        n_ctx=max(_CONTEXT, 2 * drafts),
        n_batch=_CONTEXT,
        fastmtp_size=-1 if whole_vocabulary else 0,
    ) as llm:
        if llm.head is None:
            raise RequestError("drafting is switched off by MTP_GGUF_DISABLE")
        if text is None:
            parts = list(places_of(llm))
        else:
            tokens = llm.tokenize(text.encode(), add_bos=False)
            parts = [(tokens[:_PROMPT], tokens[_PROMPT : _PROMPT + drafts])]
        count = sum(len(places) for _, places in parts)
        if count < _LEAST_CHAINS:
            raise RequestError(
                f"its tokenizer makes only {count + _PROMPT} tokens of the test text, "
                f"expected {_PROMPT + _LEAST_CHAINS} or more"
            )
        began = perf_counter()
        ways = ([0] * (depth + 1), [0] * (depth + 1))  # chains by way and number of accepted drafts
        chain = 0
        for seed, (prompt, places) in enumerate(parts):
            llm.session.remove(0)
            llm.session.set_sampling(1.0, seed=seed)
            llm.session.decode(prompt)
            for token in places:
                if chain >= _LEAST_CHAINS and perf_counter() - began > seconds:
                    break
                sampled = text is None and chain % 2 == 1
                ways[sampled][accepted_drafts(llm.session, token, depth, sampled=sampled)] += 1
                chain += 1
        return Measured(_counts(ways[0]), _counts(ways[1]), perf_counter() - began)


def places_of(llm: "MTPLlama") -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens of each passage before the first chain, and those that chains begin at."""
    try:
        write = chat_writer(llm.metadata.get("tokenizer.chat_template"))
    except RequestError:  # answers can be predicted without it
        write = None
    for passage in corpus():
        prompt: list[int] = []
        if passage.message:
            message = f"{passage.message}\n\n"
            with suppress(RequestError):
                message = write(passage.message) if write else message
            prompt = llm.tokenize(message.encode(), add_bos=False, special=True)
        tokens = llm.tokenize(passage.text.encode(), add_bos=False)
        yield prompt + tokens[:_PROMPT], tokens[_PROMPT : _PROMPT + _CHAINS]


def accepted_drafts(session: "Session", token: int, depth: int, *, sampled: bool) -> int:
    """Append `token`; return how many drafts after it the trunk accepts, which are removed."""
    end = session.length() + 1
    step = session.step_sampled if sampled else session.step
    accepted = len(step(token, depth)) - 1
    session.remove(end)
    return accepted


def _counts(chains: Sequence[int]) -> Counts:
    """chains[n]: number of chains whose first n drafts were accepted, and no others."""
    accepted = tuple(sum(chains[position:]) for position in range(1, len(chains)))
    return Counts((sum(chains),) * len(accepted), accepted)


def _measure() -> dict[str, Any]:
    return asdict(measure_acceptance(Path(sys.argv[1]), **parse_json(sys.argv[2])))


if __name__ == "__main__":
    sys.exit(print_found(_measure))
