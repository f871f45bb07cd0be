"""Tokens per second with a head as it is stored and quantized while loading, interleaved.

    python benchmarks/head_types.py MODEL.gguf [--types Q8_0,Q4_K] [--depth 3|auto]
        [--rounds 12] [--tokens 48]

Each round generates the same greedy text with every type, in another order. Prints for each
type the median ratio to the stored one, with the quartiles, and its accepted drafts. The
"type" again is the stored one once more, which shows what differs by chance.
"""

import argparse
from contextlib import ExitStack, closing
from itertools import islice
from time import perf_counter

from mtp_gguf.bench.stats import summarize
from mtp_gguf.native.llama.mtp_llama import MTPLlama

STORED, AGAIN = "as stored", "again"
PROMPT = "Write a program that sorts the lines of a file by their length, and explain each step.\n"


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--types", default="Q8_0,Q4_K")
    parser.add_argument("--depth", default="3")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()
    depth = arguments.depth if arguments.depth == "auto" else int(arguments.depth)
    names = [STORED, *arguments.types.split(",")]
    speeds: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        models = {
            name: stack.enter_context(
                closing(
                    MTPLlama(
                        arguments.model,
                        depth=depth,
                        lookup=False,
                        profile=False,
                        n_ctx=512,
                        mtp_type=None if name in (STORED, AGAIN) else name,
                    )
                )
            )
            for name in names
        }
        for model in models.values():
            if model.type_choice is not None:
                print(model.type_choice.text)
        tokens = models[STORED].tokenize(PROMPT.encode())
        for number in range(arguments.rounds + 1):
            texts = set()
            for place in range(len(names)):
                name = names[(place + number) % len(names)]
                stream = models[name].generate(tokens, temp=0.0)
                text = [next(stream)]  # the prompt is read
                began = perf_counter()
                text += islice(stream, arguments.tokens)
                seconds = perf_counter() - began
                stream.close()
                texts.add(tuple(text))
                if number:  # the first round warms up
                    speeds[name].append(arguments.tokens / seconds)
            if len(texts) > 1:
                print("the texts differ")
        for name in names:
            pairs = zip(speeds[name], speeds[STORED], strict=True)
            ratio = summarize([speed / stored for speed, stored in pairs])
            stats = models[name].mtp_stats
            accepted, drafted = sum(stats.accepted), sum(stats.drafted)
            print(
                f"{name:10} {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}), "
                f"{max(speeds[name]):.1f} tokens/s at best, accepted {accepted} of {drafted}"
            )


if __name__ == "__main__":
    main()
