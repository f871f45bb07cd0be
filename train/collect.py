"""Runs the trunk that will draft later and records its hidden states, from texts or own answers.

The states are those that the head will be fed with at run time: of this file's trunk, at its
quantization, on this machine's kernels.
"""

import hashlib
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.profile import identify
from mtp_gguf.native.chat.generate import chat_writer
from mtp_gguf.native.llama.mtp_llama import MTPLlama

from .answers import Job, Writer
from .dataset import DataWriter, Sample

_BATCH = 512  # tokens that are read at once
# Shorter pieces at the end of a file are left out: nothing follows their first rows.
_SHORTEST = 16
# One text or prompt in so many is held out. The trunk itself continues a held-out text greedily,
# because that is what drafts are measured on at run time.
_HELD_OUT_ONE_IN = 10
_BEGINNING, _CONTINUATION = 32, 96  # tokens
_LEAST_SAMPLES = 2  # a held-out one, and one to train on, of texts and of answers


@dataclass(frozen=True)
class CollectSettings:
    """How much to collect.

    length: most tokens of a sample. tokens: when to stop. answers: answers to each prompt, the
    first of them greedy and the others sampled at `temperature`. chat: apply the chat template.
    """

    length: int = 512
    tokens: int = 200_000
    answers: int = 4
    temperature: float = 0.8
    seed: int = 1
    chat: bool = True


@dataclass(frozen=True)
class Texts:
    """Texts to read, prompts to answer, or both."""

    texts: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()

    def key(self) -> dict[str, str]:
        """What identifies them, without their contents."""
        found = {}
        for kind, texts in vars(self).items():
            digest = hashlib.sha256()
            for text in texts:
                digest.update(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
            found[kind] = digest.hexdigest()
        return found


def data_key(model: Path, texts: Texts, settings: CollectSettings) -> dict[str, Any]:
    """What collected states depend on."""
    identity = identify(model)
    return {
        "model": identity.fingerprint,
        "model_bytes": identity.size,
        **texts.key(),
        **asdict(settings),
    }


def bytes_needed(width: int, settings: CollectSettings) -> int:
    """Bytes on disk that collecting takes at most."""
    return settings.tokens * (2 * width + 4)


def collect(
    model: Path,
    folder: Path,
    texts: Texts,
    settings: CollectSettings,
    *,
    threads: int | None = None,
    gpu_layers: int = 0,
    seconds: float = float("inf"),
    progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Run the trunk over `texts` and keep its states in `folder`; returns the tokens there.

    Goes on where an interrupted run with the same arguments stopped. seconds: stop after this long,
    once there is something to learn from and something to measure with.
    progress: called with the number of tokens on disk so far. RequestError if nothing can be
    learned from the texts, or a prompt leaves no room for an answer.
    """
    writer = DataWriter(folder, data_key(model, texts, settings))
    if writer.finished:
        return writer.tokens
    began = time.monotonic()
    least = _LEAST_SAMPLES * (bool(texts.texts) + bool(texts.prompts))
    with Trunk(model, settings, threads, gpu_layers) as trunk:
        jobs = trunk.jobs(texts)
        progress(writer.tokens)
        try:
            for sample in trunk.samples(jobs[writer.samples :]):
                writer.add(sample)
                progress(writer.tokens)
                late = time.monotonic() - began > seconds and writer.samples >= least
                if writer.tokens >= settings.tokens or late:
                    break
        except KeyboardInterrupt:
            writer.flush()
            raise
    writer.finish()
    return writer.tokens


class Trunk:
    """The trunk of a GGUF, a context manager."""

    def __init__(
        self, path: Path, settings: CollectSettings, threads: int | None, gpu_layers: int
    ) -> None:
        self._settings = settings
        options: dict[str, Any] = {"n_threads": threads, "n_threads_batch": threads}
        self._llm = MTPLlama(
            str(path),
            depth=0,
            profile=False,
            keep_prompt=False,
            n_ctx=settings.length,
            n_batch=_BATCH,
            n_ubatch=_BATCH,
            n_gpu_layers=gpu_layers,
            **options,
        )
        self._path = path
        self._llm.session.want_hidden()

    def __enter__(self) -> "Trunk":
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.close()

    def jobs(self, texts: Texts) -> list[Job]:
        """What to run, in a fixed order that mixes the texts; the first is held out.

        So the first jobs are enough for a short training if time is limited. Pieces of text and
        prompts are interleaved.
        """
        kinds = []
        if texts.texts:
            jobs = list(self._pieces(texts.texts))
            name = f"pieces of text from {_SHORTEST} tokens on"
            kinds.append(_held_out_first(jobs, name, len(texts.texts)))
        if texts.prompts:
            jobs = list(self._answers(texts.prompts))
            kinds.append(_held_out_first(jobs, "prompts", len(texts.prompts)))
        together = itertools.zip_longest(*kinds)
        return [job for some in together for job in some if job is not None]

    def _pieces(self, texts: Sequence[str]) -> Iterator[Job]:
        length = self._settings.length
        pieces: list[tuple[int, ...]] = []
        for text in texts:
            tokens = self._tokenize(text)
            cut = (tuple(tokens[at : at + length]) for at in range(0, len(tokens), length))
            pieces += [piece for piece in cut if len(piece) >= _SHORTEST]
        if len(only := {token for piece in pieces for token in piece}) == 1:
            raise RequestError(
                f"expected a text of several tokens, found only token {only.pop()}, from which "
                "nothing can be learned"
            )
        random.Random(self._settings.seed).shuffle(pieces)
        room = itertools.accumulate(map(len, pieces), initial=0)
        pieces = [
            p for p, before in zip(pieces, room, strict=False) if before < self._settings.tokens
        ]
        for piece, held_out in zip(pieces, _held_out(len(pieces)), strict=True):
            if held_out:
                beginning = piece[: min(_BEGINNING, length // 2)]
                yield Job(beginning, True, min(_BEGINNING + _CONTINUATION, length))
            else:
                yield Job(piece, False)

    def _answers(self, texts: Sequence[str]) -> Iterator[Job]:
        template = self._llm.metadata.get("tokenizer.chat_template")
        write = chat_writer(template) if self._settings.chat else None
        length = self._settings.length
        prompts = []
        for text in texts:
            tokens = self._tokenize(write(text) if write else text)
            if not 0 < len(tokens) <= length - _SHORTEST:
                raise RequestError(
                    f"a prompt has {len(tokens)} tokens, expected 1 to {length - _SHORTEST} "
                    f"(--length, less room for an answer): {text[:40]!r}"
                )
            prompts.append(tuple(tokens))
        most = max(1, self._settings.tokens // (_HELD_OUT_ONE_IN * length))
        held_out = _held_out(len(prompts), most)
        for answer in range(self._settings.answers):
            for i, prompt in enumerate(prompts):
                seed = self._settings.seed + answer * len(prompts) + i
                if not answer:
                    yield Job(prompt, held_out[i], length)
                elif not held_out[i]:
                    yield Job(prompt, False, length, seed)

    def _tokenize(self, text: str) -> list[int]:
        data = text.encode("utf-8", "replace")
        return list(self._llm.tokenize(data, add_bos=False, special=True))

    def samples(self, jobs: Iterable[Job]) -> Iterator[Sample]:
        """Read the text of each job in its order, once it is answered."""
        settings = self._settings
        with Writer(self._llm, settings.length, settings.temperature) as writer:
            for job, tokens, states in writer.texts(jobs):
                start = len(job.tokens) - 1 if job.length else 0
                hidden = self._read(tokens) if states is None else states
                if not np.isfinite(hidden).all():
                    raise RequestError(
                        f"{self._path}: expected finite states, found NaN or infinity; nothing can "
                        "be learned from this trunk"
                    )
                yield Sample(np.asarray(tokens, np.int32), hidden, start, job.held_out)

    def _read(self, tokens: list[int]) -> NDArray[np.float16]:
        session = self._llm.session
        session.remove(0)
        parts = []
        for at in range(0, len(tokens), _BATCH):
            session.decode(part := tokens[at : at + _BATCH])
            parts.append(session.hidden(len(part)).astype(np.float16))
        return np.concatenate(parts)


def _held_out_first(jobs: list[Job], name: str, count: int) -> list[Job]:
    """The jobs of `count` texts, a held-out one first; RequestError if nothing else is left."""
    held_out = [i for i, job in enumerate(jobs) if job.held_out]
    if len(held_out) == len(jobs):
        raise RequestError(
            f"expected two or more {name}, of which one is held out, found {len(jobs)} in {count}; "
            "give more text, or a smaller --length"
        )
    return [jobs.pop(held_out[0]), *jobs]


def _held_out(count: int, most: int | None = None) -> list[bool]:
    """Which of `count` texts are held out: one in ten, or the last of a few; at most `most`."""
    every = min(_HELD_OUT_ONE_IN, max(count, 1))
    return [i % every == every - 1 and (most is None or i < most * every) for i in range(count)]
