"""How many drafts does a draft vocabulary cost on texts in several languages?

    python benchmarks/draft_vocabulary.py MODEL de=TEXT ja=TEXT …

Any model that llama.cpp runs takes the part of the head: its most likely next token is the draft,
and the text is what is verified. So drafts over the whole vocabulary, over lists by id as they are
made for files without one, and over lists whose end follows the text are compared on the same
logits. Counted after the first tokens of each piece of text.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.convert.heads.draft_vocabulary import rank_by_id
from mtp_gguf.gguf_tools.heads.draft_list import required_ids
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.native.llama.mtp_llama import MTPLlama

SIZES = (16384, 32768, 65536)
WAYS = ("", " + text", " + scripts")
BATCH = 64
BROUGHT = 32  # tokens of its script that come with a token of the text


def script_of(text: str) -> int:
    """A number for the script of the first character beyond ASCII; 0 if there is none."""
    for character in text:
        code = ord(character)
        if code >= 0x2000:
            ranges = ((0x4E00, 0xA000), (0x3040, 0x3100), (0xAC00, 0xD7B0))
            return next((i for i, (a, b) in enumerate(ranges, 2) if a <= code < b), 5)
        if code >= 0x80:
            return 1 if code < 0x250 else 6 + (code >> 7)
    return 0


class List:
    """A list whose end follows the text, as native/src/draft_ring.cpp has it."""

    def __init__(self, ids: NDArray[np.int64], text: int, brought: int, scripts: list[int]) -> None:
        """text, brought: how many ids are replaced by tokens of the text, and of its scripts."""
        self.ids = ids.copy()
        self.places = {int(token): place for place, token in enumerate(ids)}
        self.first = len(ids) - text - brought
        self.areas = {"text": text, "script": brought}
        self.ends = {"text": len(ids), "script": len(ids) - text}
        self.counts = Counter[str]()
        self.added: set[int] = set()
        self.scripts = scripts
        self.waiting: dict[int, list[int]] = {}
        if brought:
            for token in reversed(range(len(scripts))):
                self.waiting.setdefault(scripts[token], []).append(token)
        self.come = Counter[int]()

    def has(self, token: int) -> bool:
        place = self.places.get(token)
        return place is not None and (place < self.first or token in self.added)

    def put(self, token: int, area: str) -> None:
        place = self.ends[area] - 1 - self.counts[area] % self.areas[area]
        self.counts[area] += 1
        replaced, before = int(self.ids[place]), self.places.get(token)
        self.added.discard(replaced)
        del self.places[replaced]
        if before is not None and before != place:
            self.ids[before], self.places[replaced] = replaced, before
        self.ids[place], self.places[token] = token, place
        self.added.add(token)

    def follow(self, token: int) -> None:
        if self.areas["text"] and not self.has(token):
            self.put(token, "text")
        script, n = self.scripts[token], 0
        waiting = self.waiting.get(script, []) if script else []
        while n < BROUGHT and waiting and self.come[script] < self.areas["script"] // 2:
            other = waiting.pop()
            if not self.has(other):
                self.put(other, "script")
                self.come[script] += 1
                n += 1


def accepted(
    model: MTPLlama, tokens: Sequence[int], skip: int, lists: Sequence[List]
) -> NDArray[np.int64]:
    """How many drafts were right after `skip` tokens: over all tokens, and over each list."""
    counts = np.zeros(1 + len(lists), np.int64)
    model.reset()
    for start in range(0, len(tokens) - 1, BATCH):
        part = tokens[start : start + BATCH]
        model.eval(part)
        for at, token in enumerate(part, start):
            logits = model.scores[at]
            best = int(logits.argmax())
            for i, one in enumerate([None, *lists]):
                if one is not None:
                    one.follow(token)
                if at < skip or at + 1 >= len(tokens):
                    continue
                known = one is None or best in one.places
                draft = best if known or one is None else int(one.ids[logits[one.ids].argmax()])
                counts[i] += draft == tokens[at + 1]
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--skip", type=int, default=256, help="tokens that are not counted [256]")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a piece [1024]")
    parser.add_argument("--pieces", type=int, default=2, help="pieces of each text [2]")
    parser.add_argument("--ring", type=int, default=2048, help="ids for the text [2048]")
    parser.add_argument("--scripts", type=int, default=8192, help="ids for its scripts [8192]")
    options = parser.parse_args()
    with open_model(options.model) as file:
        required, n_vocab = required_ids(file), file.vocabulary_size or 0
    made = {size: rank_by_id(required, n_vocab, size).ids for size in SIZES}
    names = [f"{size}{way}" for size in SIZES for way in WAYS]
    print("text      drafts   whole  " + " ".join(f"{name:>15}" for name in names))
    with closing(
        MTPLlama(
            str(options.model),
            depth=0,
            n_ctx=options.tokens,
            n_batch=BATCH,
            logits_all=True,
            verbose=False,
        )
    ) as model:
        words = [model.detokenize([i]).decode(errors="ignore") for i in range(model.n_vocab())]
        scripts = [*map(script_of, words), *[0] * (n_vocab - len(words))]
        for text in options.texts:
            name, _, path = text.partition("=")
            data = Path(path).read_bytes()
            ids = model.tokenize(data, add_bos=False)
            counts, total = np.zeros(1 + len(names), np.int64), 0
            step = max((len(ids) - options.tokens) // max(options.pieces - 1, 1), 1)
            for piece in range(options.pieces):
                tokens = ids[piece * step :][: options.tokens]
                ends = ((0, 0), (options.ring, 0), (options.ring, options.scripts))
                lists = [List(made[size], *end, scripts) for size in SIZES for end in ends]
                counts += accepted(model, tokens, options.skip, lists)
                total += len(tokens) - 1 - options.skip
            shares = counts / total
            lost = " ".join(f"{100 * (share - shares[0]):+15.1f}" for share in shares[1:])
            print(f"{name:8} {total:7} {shares[0]:7.1%}  {lost}")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
