"""Count how often several slots of a llama-server give a text that one slot does not.

    python benchmarks/server_slots.py LLAMA_SERVER MODEL [--depth 3] [--no-prompt-cache]

Eight clients request texts from four slots; these are compared with the beginnings of the texts
that a single slot without drafting gives to the same prompts, up to their first near tie, which
rounding could decide differently. Prints one line of JSON: the number of requests, of those that
differed, and the first few of these as (request, prompt, position of the first different token).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.ports import free_port
from support.real_server import TEXTS, TOKENS, certain, running

CLIENTS, SLOTS, SEED = 8, 4, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--depth", type=int, default=0, help="tokens to draft [0: none]")
    parser.add_argument("--no-prompt-cache", action="store_true")
    parser.add_argument("--requests", type=int, default=800)
    arguments = parser.parse_args()

    alone = ["--no-draft"]
    with running(arguments.server, arguments.model, free_port(), options=alone) as client:
        texts = [certain(client.complete(text, n_probs=2)) for text in TEXTS]
    options = ["--spec-draft-n-max", arguments.depth] if arguments.depth else alone
    slots = ("--parallel", SLOTS)
    found: list[tuple[int, int, int]] = []
    with running(arguments.server, arguments.model, free_port(), *slots, options=options) as client:

        def ask(number: int) -> None:
            choice = random.Random(f"{SEED} {number}")
            index, length = choice.randrange(len(TEXTS)), choice.randrange(1, TOKENS)
            tokens = client.complete(
                TEXTS[index], n_predict=length, cache_prompt=not arguments.no_prompt_cache
            )["tokens"]
            pairs = enumerate(zip(tokens, texts[index], strict=False))
            place = next((place for place, (have, want) in pairs if have != want), None)
            if place is not None:
                found.append((number, index, place))

        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(ask, range(arguments.requests)))
    print(
        json.dumps(
            {
                "depth": arguments.depth,
                "prompt_cache": not arguments.no_prompt_cache,
                "requests": arguments.requests,
                "differ": len(found),
                "first": sorted(found)[:8],
            }
        )
    )


if __name__ == "__main__":
    main()
