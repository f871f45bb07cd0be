"""How many drafts does a draft vocabulary cost on texts in several languages?

    python benchmarks/draft_vocabulary.py MODEL de=TEXT ja=TEXT …

Any model that llama.cpp runs takes the part of the head: its most likely next token is the draft,
and the text is what is verified. So drafts over the whole vocabulary, over lists by id as they are
made for files without one, and over lists whose end follows the text are compared on the same
logits. Counted after the first tokens (--skip) of each of some --pieces of --tokens of a text;
--ring ids follow the text.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
from measuring import options
from numpy.typing import NDArray

from mtp_gguf.convert.heads.draft_vocabulary import rank_by_id
from mtp_gguf.gguf_tools.heads.draft_list import required_ids
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.native.llama.mtp_llama import MTPLlama

SIZES = (16384, 32768, 65536)
WAYS = ("", " + text", " + like it")
BATCH = 64
START, N = 255, 256  # the symbol before a token's first, and how many there are
FIRST_IDS, SINGLES, PAIRS, FIRST_RANKED = 1000, 50, 20, 32  # as in native/src/token_likeness.cpp


def symbol_of(character: str) -> int:
    """As in native/src/head/token_symbols.cpp."""
    code = ord(character)
    if code < 0x80:
        return max(code - 0x20, 0)
    if 0xC0 <= code < 0x100:
        return 96 + code - 0xC0
    if code < 0x250:
        return 160
    if code < 0x2000:
        return 165 + (code >> 7)
    ranges = ((0x4E00, 0xA000), (0x3040, 0x3100), (0xAC00, 0xD7B0))
    return next((i for i, (a, b) in enumerate(ranges, 161) if a <= code < b), 164)


class Likeness:
    """Which tokens are likely in a text, as native/src/token_likeness.cpp has it."""

    def __init__(self, words: Sequence[str]) -> None:
        pairs = [
            [before * N + symbol for before, symbol in pairwise([START, *map(symbol_of, word)])]
            for word in words
        ]
        self.tokens = np.repeat(np.arange(len(words)), [len(each) for each in pairs])
        self.pairs = np.array([pair for each in pairs for pair in each])
        self.starts = np.searchsorted(self.tokens, np.arange(len(words) + 1))
        chances = 1 / (np.arange(len(words)) + FIRST_IDS)
        self.log_chances = np.log(chances)
        found = np.bincount(self.pairs, chances[self.tokens], N * N).reshape(N, N)
        self.singles = found.sum(0) / found.sum()
        self.chances = found / np.maximum(found.sum(1, keepdims=True), 1e-300)

    def scores(self, text: Sequence[int]) -> NDArray[np.float64]:
        """Of each token, in a text with these."""
        own = [self.pairs[self.starts[token] : self.starts[token + 1]] for token in text]
        counts = np.bincount(np.concatenate(own), minlength=N * N).reshape(N, N)
        some = self.singles > 0
        single = np.ones(N)
        expected = counts.sum(0)[some] / self.singles[some]
        single[some] = (expected + SINGLES) / (counts.sum() + SINGLES)
        known = self.chances > 0
        backoff = PAIRS * single / np.maximum(self.chances @ single, 1e-300)[:, None]
        ratios = (counts / np.where(known, self.chances, 1) + backoff) / (
            counts.sum(1, keepdims=True) + PAIRS
        )
        logs = np.where(known, np.log(ratios), 0).ravel()
        return self.log_chances + np.bincount(self.tokens, logs[self.pairs], len(self.log_chances))


class List:
    """A list whose end follows the text, as native/src/draft_ring.cpp has it.

    For texts of up to 2,048 different tokens, after which the ring there lets the oldest go.
    """

    def __init__(
        self, ids: NDArray[np.int64], text: int, like: int, likeness: Likeness | None
    ) -> None:
        """text, like: how many ids are replaced by tokens of the text, and by those like them."""
        self.text, self.likeness = text, likeness if like else None
        self.first = len(ids) - text - like
        self.listed = ids
        self.seen: dict[int, None] = {}
        self.ranked = 0
        self.free = list(ids[self.first :][::-1])  # to be replaced, the least useful first
        self.known = np.zeros(
            int(ids.max()) + 1 if likeness is None else len(likeness.starts), bool
        )
        self.known[ids] = True

    def follow(self, token: int) -> None:
        if not self.text or token in self.seen:
            return
        self.seen[token] = None
        n = self.ranked or FIRST_RANKED
        if self.ranked:
            n += n // 2
        if self.likeness and len(self.seen) == n:
            self.ranked = n
            scores = self.likeness.scores(list(self.seen))
            scores[self.listed[: self.first]] = -np.inf
            room = len(self.listed) - self.first
            best = np.lexsort((np.arange(len(scores)), -scores))[:room]
            self.known[:] = False
            self.known[self.listed[: self.first]] = True
            self.known[best] = True
            self.free = list(best[::-1])
            for one in self.seen:
                self.put(one)
        else:
            self.put(token)

    def put(self, token: int) -> None:
        """In place of the least useful id that no text has had."""
        if not self.known[token]:
            while (least := self.free.pop(0)) in self.seen:
                pass
            self.known[least] = False
            self.known[token] = True


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
                draft = best
                if one is not None and not one.known[best]:
                    ids = np.flatnonzero(one.known)
                    draft = int(ids[logits[ids].argmax()])
                counts[i] += draft == tokens[at + 1]
    return counts


def main() -> None:
    parser = options(__doc__, {"--skip": 256, "--tokens": 1024, "--pieces": 2, "--ring": 2048})
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", nargs="+", metavar="NAME=FILE")
    arguments = parser.parse_args()
    with open_model(arguments.model) as file:
        required, n_vocab = required_ids(file), file.vocabulary_size or 0
    made = {size: rank_by_id(required, n_vocab, size).ids for size in SIZES}
    names = [f"{size}{way}" for size in SIZES for way in WAYS]
    print("text      drafts   whole  " + " ".join(f"{name:>15}" for name in names))
    with closing(
        MTPLlama(
            str(arguments.model),
            depth=0,
            n_ctx=arguments.tokens,
            n_batch=BATCH,
            logits_all=True,
            verbose=False,
        )
    ) as model:
        words = [model.detokenize([i]).decode(errors="ignore") for i in range(model.n_vocab())]
        likeness = Likeness([*words, *[""] * (n_vocab - len(words))])
        for text in arguments.texts:
            name, _, path = text.partition("=")
            data = Path(path).read_bytes()
            ids = model.tokenize(data, add_bos=False)
            counts, total = np.zeros(1 + len(names), np.int64), 0
            step = max((len(ids) - arguments.tokens) // max(arguments.pieces - 1, 1), 1)
            for piece in range(arguments.pieces):
                tokens = ids[piece * step :][: arguments.tokens]
                lists = [
                    List(made[size], text, like, likeness)
                    for size in SIZES
                    for text, like in ((0, 0), (arguments.ring, 0), (arguments.ring, size * 3 // 8))
                ]
                counts += accepted(model, tokens, arguments.skip, lists)
                total += len(tokens) - 1 - arguments.skip
            shares = counts / total
            lost = " ".join(f"{100 * (share - shares[0]):+15.1f}" for share in shares[1:])
            print(f"{name:8} {total:7} {shares[0]:7.1%}  {lost}")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
