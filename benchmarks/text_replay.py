"""Whether drafts from the text pay on a model's answers, replayed with given times of batches.

    python benchmarks/text_replay.py MODEL.gguf QUESTIONS.txt [--texts 64] [--tokens 256]
        [--batches 12 13.4 14.7 …] [--rounds 5] [--threads 2]

QUESTIONS.txt has a question in each paragraph, such as the questions.txt of real.py. The model
answers some of them once, greedily. Then each answer is generated again by the choices that a
session without a head makes, but the trunk is replaced by the answer, and the clock by --batches:
the milliseconds of a batch of 1, 2, … tokens, as `mtp-gguf bench` prints them, scattered by 3 %;
each token of larger ones costs as much more as the last one. So constants are compared without the
noise of a machine. Printed are the time without drafts over that with them, of all answers and of
the one that gains least, if what one text has taught is kept for the next, as by a server, and if
it is not.
"""

from __future__ import annotations

import random
import sys
from contextlib import closing
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple

from measuring import options

from mtp_gguf.gguf_tools.errors import MtpGgufError
from mtp_gguf.gguf_tools.machine.text_files import paragraphs
from mtp_gguf.native import MTPLlama
from mtp_gguf.native.chat.generate import chat_writer
from mtp_gguf.native.depth import DepthChooser, Outcome

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.text_drafts import TextDrafts

MOST = 14  # drafts from the text in a cycle
SCATTER = 0.03
# Of Qwen2.5-Coder-0.5B on two cores of a Zen 4.
BATCHES = [12.0, 13.4, 14.7, 17.4, 18.9, 23.8, 26.6, 28.2, 29.9]
SHORTEST = 32  # tokens of an answer that counts


class Text(NamedTuple):
    """A question and its answer, as tokens."""

    prompt: list[int]
    answer: list[int]


def answers(model: Path, questions: list[str], tokens: int, threads: int) -> list[Text]:
    """What the model answers, up to its end."""
    found = []
    with closing(MTPLlama(model, depth=0, n_ctx=4096, n_threads=threads, lookup=True)) as llm:
        write_chat = chat_writer(llm.metadata.get("tokenizer.chat_template")) or str
        for question in questions:
            prompt = llm.tokenize(write_chat(question).encode(), add_bos=False, special=True)
            llm.reset()
            answer = [*islice(llm.generate(prompt, temp=0.0), tokens)]
            found.append(Text(prompt, [*takewhile(lambda token: token != llm.token_eos(), answer)]))
    return [text for text in found if len(text.answer) >= SHORTEST]


class Replay:
    """The choices of a session without a head, and what they cost."""

    def __init__(self, batches: list[float], scatter: random.Random) -> None:
        self.batches, self.scatter = batches, scatter
        self.drafts = TextDrafts(DepthChooser(0))

    def milliseconds(self, tokens: int) -> float:
        """The time of a batch."""
        known = self.batches
        beyond = max(tokens - len(known), 0) * (known[-1] - known[-2])
        ms = known[min(tokens, len(known)) - 1] + beyond
        return ms * self.scatter.lognormvariate(0, SCATTER)

    def generate(self, text: Text) -> float:
        """The milliseconds that the answer takes."""
        self.drafts.set([], generated=False)
        self.drafts.set(text.prompt, generated=False)
        total, done, n = 0.0, 1, len(text.answer)
        while done < n:
            self.drafts.set(text.prompt + text.answer[:done], generated=True)
            drafted = self.drafts.plan(min(MOST, n - done - 1), 0)
            pairs = zip(drafted, text.answer[done:], strict=False)
            right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            ms = self.milliseconds(len(drafted) + 1)
            if drafted:
                self.drafts.report(len(drafted), right, ms)
            else:
                self.drafts.chooser.report(Outcome(verify_ms=ms))
            total, done = total + ms, done + right + 1
        return total


def main() -> None:
    parser = options(__doc__, {"--texts": 64, "--tokens": 256, "--rounds": 5, "--threads": 2})
    parser.add_argument("model", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--batches", type=float, nargs="+", default=BATCHES)
    args = parser.parse_args()
    if len(args.batches) < 2:
        parser.error("--batches: expected two or more times, found one")
    try:
        questions = paragraphs([args.questions])
        chosen = random.Random(1).sample(questions, min(args.texts, len(questions)))
        texts = answers(args.model, chosen, args.tokens, args.threads)
    except MtpGgufError as error:
        sys.exit(str(error).removeprefix("--prompt-file: "))
    if not texts:
        sys.exit(f"{args.model}: expected answers of {SHORTEST} tokens or more, found none")
    print(f"{len(texts)} answers, {sum(len(text.answer) for text in texts)} tokens")
    for name, kept in (("kept", True), ("not kept", False)):
        scatter = random.Random(1)
        plain, drafted, least = 0.0, 0.0, float("inf")
        for _ in range(args.rounds):
            replay = Replay(args.batches, scatter)
            for text in scatter.sample(texts, len(texts)):
                if not kept:
                    replay.drafts.close()
                    replay = Replay(args.batches, scatter)
                without = sum(replay.milliseconds(1) for _ in text.answer[1:])
                ms = replay.generate(text)
                plain, drafted, least = plain + without, drafted + ms, min(least, without / ms)
            replay.drafts.close()
        print(
            f"{name}: {plain / drafted:.3f} times as fast; the answer that gains least: {least:.3f}"
        )


if __name__ == "__main__":
    main()
