"""Processes that end, or collect their garbage, while a stream of MTPLlama is unfinished.

    cd tests; python -m support.unfinished_streams MODEL WAY…

Each way is one process's end, in a child of this one; prints how many of each died of a signal.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from mtp_gguf.native import MTPLlama

MESSAGES: Any = [{"role": "user", "content": "aha"}]
CHAINS: dict[str, dict[str, Any]] = {
    "rejection": {"temperature": 0.8},
    "equality": {"temperature": 0.0, "repeat_penalty": 1.1},
    "processor": {"temperature": 0.0, "logit_bias": {65: 1.0}},  # a cycle stays open
}


class Reader:
    """A model and its stream in one cycle of references, as frameworks keep them."""

    def __init__(self, path: str, chain: str) -> None:
        self.llm = MTPLlama(path, n_ctx=128, n_threads=1, n_threads_batch=1, profile=False)
        self.stream: Iterator[Any] = self.llm.create_chat_completion(
            MESSAGES, stream=True, max_tokens=60, **CHAINS[chain]
        )
        for _ in range(3):
            next(self.stream)
        self.itself = self


KEPT: list[Reader] = []


def leave(path: str, way: str) -> None:
    """End this process in a way."""
    how, chain = way.split("/")
    reader = Reader(path, chain)
    if how == "exit":  # module globals are taken down with the stream in them
        KEPT.append(reader)
    elif how == "main":
        sys.modules["__main__"].__dict__.update(stream=reader.stream, llm=reader.llm)
    elif how == "collect":
        del reader
        gc.collect()
    elif how == "model first":
        stream = reader.stream
        reader.llm.close()
        del reader
        gc.collect()
        stream.close()  # type: ignore[attr-defined]
    elif how == "stream first":
        reader.stream.close()  # type: ignore[attr-defined]
        reader.llm.close()


def main(path: str, ways: list[str]) -> Counter[str]:
    """How often a child of each way died, or complained."""
    died: Counter[str] = Counter()
    for way in ways:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.dup2(writing, 2)
            os.close(reading)
            leave(path, way)
            sys.exit(0)
        os.close(writing)
        with os.fdopen(reading) as errors:
            said = errors.read()
        _, status = os.waitpid(child, 0)
        if status or "Exception ignored" in said:
            died[way] += 1
    return died


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2:])))
