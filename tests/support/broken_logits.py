"""How MTPLlama reacts to logits of the trunk that are NaN or infinite.

    cd tests; python -m support.broken_logits '{"nan": "MODEL", …}' DEPTH…

Prints JSON: the generated tokens and the final error, for each model and each sampler chain.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

from mtp_gguf.native import MTPLlama, NativeError
from mtp_gguf.native.runtime import llama_cpp
from support.generation import load

PROMPT = [3, 1, 4, 1, 5]
TOKENS = 12
OFF = {"temp": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def same(_: Any, scores: Any) -> Any:
    return scores


CHAINS: dict[str, dict[str, Any]] = {
    "unfiltered": OFF,
    "top-k": {**OFF, "top_k": 40},
    "top-p": {**OFF, "top_p": 0.9},
    "min-p": {**OFF, "min_p": 0.05},
    "llama_cpp's": {"temp": 0.7},
    "penalties": {"temp": 0.7, "repeat_penalty": 1.1},
    "processor": {"temp": 0.7, "logits_processor": llama_cpp.LogitsProcessorList([same])},
    "greedy": {"temp": 0.0},
}


def end_of(llm: MTPLlama, **chain: Any) -> tuple[list[int], str]:
    """The tokens that came, and the error that ended them, if any."""
    tokens: list[int] = []
    try:
        for token in itertools.islice(llm.generate(PROMPT, **chain), TOKENS):
            tokens.append(int(token))
    except NativeError as error:
        return tokens, str(error)
    return tokens, ""


def main(models: dict[str, str], depths: list[Any]) -> dict[str, dict[str, Any]]:
    """How texts ended, by model, then by depth and chain."""
    out: dict[str, dict[str, Any]] = {}
    for name, path in models.items():
        out[name] = {}
        for depth in depths:
            with load(Path(path), depth=depth) as llm:
                for chain, settings in CHAINS.items():
                    out[name][f"{depth} {chain}"] = end_of(llm, **settings)
                    llm.reset()
    return out


if __name__ == "__main__":
    words = [int(word) if word.isdigit() else word for word in sys.argv[2:]]
    print(json.dumps(main(json.loads(sys.argv[1]), words)))
