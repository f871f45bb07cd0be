"""Tokens per second with a head as it is stored and quantized while loading, interleaved.

    python benchmarks/head_types.py MODEL.gguf [--types Q8_0,Q4_K] [--depth 3|auto]
        [--rounds 12] [--tokens 48]

Each round generates the same greedy text with every type, in another order. Prints for each
type the median ratio to the stored one, with the quartiles, and its accepted drafts. The
"type" again is the stored one once more, which shows what differs by chance.
"""

from contextlib import ExitStack
from functools import partial

from decode import generated, opened
from measuring import in_rounds, options, words

from mtp_gguf.bench.stats import summarize

STORED, AGAIN = "as stored", "again"
PROMPT = "Write a program that sorts the lines of a file by their length, and explain each step.\n"


def main() -> None:
    """Print the ratios."""
    parser = options(__doc__, {"--rounds": 12, "--tokens": 48})
    parser.add_argument("model")
    parser.add_argument("--types", type=words, default=["Q8_0", "Q4_K"])
    parser.add_argument("--depth", default="3")
    arguments = parser.parse_args()
    depth = arguments.depth if arguments.depth == "auto" else int(arguments.depth)
    names = [STORED, *arguments.types]
    with ExitStack() as stack:
        models = {}
        for name in names:
            kind = None if name in (STORED, AGAIN) else name
            llm = opened(arguments.model, depth, 512, None, lookup=False, mtp_type=kind)
            models[name] = stack.enter_context(llm)
            if llm.type_choice is not None:
                print(llm.type_choice.text)
        prompt = models[STORED].tokenize(PROMPT.encode())
        jobs = {n: partial(generated, llm, prompt, arguments.tokens) for n, llm in models.items()}
        rounds = in_rounds(jobs, arguments.rounds)
        for texts in zip(*rounds.values(), strict=True):
            if any(tokens != texts[0][0] for tokens, _ in texts):
                print("the texts differ")
        speeds = {n: [arguments.tokens / s for _, s in found] for n, found in rounds.items()}
        for name, llm in models.items():
            pairs = zip(speeds[name], speeds[STORED], strict=True)
            ratio = summarize([speed / stored for speed, stored in pairs])
            stats = llm.mtp_stats
            accepted, drafted = sum(stats.accepted), sum(stats.drafted)
            print(
                f"{name:10} {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}), "
                f"{max(speeds[name]):.1f} tokens/s at best, accepted {accepted} of {drafted}"
            )


if __name__ == "__main__":
    main()
