"""The trunk's states on disk: collected from texts and answers, resumable, checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mtp_gguf.gguf_tools.errors import FormatError, RequestError
from mtp_gguf.native.llama.mtp_llama import MTPLlama
from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.train import collect as collecting
from mtp_gguf.train.answers import SLOTS, Job, Writer
from mtp_gguf.train.collect import CollectSettings, Texts, Trunk, collect
from mtp_gguf.train.dataset import (
    INDEX_NAME,
    SHARD_BYTES,
    DataWriter,
    Sample,
    open_data,
    split_data,
)
from support.models import Models
from support.upstream.nextn_models import write_models

TEXT = Path(collecting.__file__).read_text(encoding="utf-8")
SETTINGS = CollectSettings(length=96, tokens=700, answers=2, chat=False)


@pytest.fixture(scope="module")
def data(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    texts = Texts((TEXT, "short", TEXT[2000:4000]))
    assert collect(demo, folder, texts, SETTINGS, threads=1) >= 700
    return folder


def test_what_is_kept_is_what_the_model_computes(demo: Path, data: Path) -> None:
    samples = open_data(data, 256)
    assert 700 <= sum(map(len, samples)) < 800
    sample = next(s for s in samples if len(s) == 96 and not s.held_out)
    options: dict[str, Any] = {"n_ctx": 128, "n_batch": 128, "n_threads": 1, "n_threads_batch": 1}
    with closing(
        MTPLlama(str(demo), depth=0, profile=False, logits_all=True, verbose=False, **options)
    ) as llm:
        llm.session.want_hidden()
        llm.eval(sample.tokens.tolist())
        hidden = llm.session.hidden(len(sample))
    # Rounded to F16; the kernels of one batch and of another may differ in the last bits.
    assert np.abs(sample.hidden - hidden).max() < 0.02


def greedy_text(llm: MTPLlama, prompt: Sequence[int], length: int) -> list[int]:
    """What llama_cpp's own loop writes after a prompt."""
    tokens = list(prompt)
    for token in llm.generate(prompt, temp=0.0):
        if len(tokens) == length:
            return tokens
        tokens.append(token)
        if token == llm.token_eos():
            return tokens
    raise AssertionError("generate ends only if it is told so")


def test_answers_are_the_models_own(demo: Path, tmp_path: Path) -> None:
    prompts = Texts(prompts=("def add(a, b):\n", "class Point:\n"))
    with Trunk(demo, SETTINGS, 1, 0) as trunk:
        jobs = trunk.jobs(prompts)
        _, greedy, sampled = trunk.samples(jobs)
        read = list(
            trunk.samples([Job(tuple(s.tokens.tolist()), False) for s in (greedy, sampled)])
        )
    assert [(job.held_out, job.seed) for job in jobs] == [(True, None), (False, None), (False, 3)]
    assert jobs[1].tokens == jobs[2].tokens != jobs[0].tokens
    for sample in (greedy, sampled):
        assert sample.start == len(jobs[1].tokens) - 1
        assert sample.tokens[: sample.start + 1].tolist() == list(jobs[1].tokens)
    for sample, again in zip((greedy, sampled), read, strict=True):
        assert np.abs(sample.hidden - again.hidden).max() < 0.02
    with closing(MTPLlama(str(demo), depth=0, profile=False, verbose=False)) as llm:
        wanted = greedy_text(llm, jobs[1].tokens, SETTINGS.length)
    assert greedy.tokens.tolist() == wanted
    assert sampled.tokens.tolist() != wanted


@pytest.mark.parametrize("name", ["demo", "moe-mixed", "next-unfused", "glm4moe"])
def test_an_answer_does_not_depend_on_the_others(models: Models, tmp_path: Path, name: str) -> None:
    """Nor on which slot it is written in; the order stays, with texts between answers."""
    known = name != "glm4moe"
    path = models.gguf(name, "F32", "F32") if known else write_models(tmp_path, [name])[name]
    jobs = [
        Job(
            tuple(range(i + 5, i + 9)),
            held_out=False,
            length=0 if i % 4 == 3 else 10 + 5 * (i % 7),
            seed=None if i % 3 else i,
        )
        for i in range(3 * SLOTS)
    ]
    with (
        closing(MTPLlama(str(path), depth=0, profile=False, verbose=False, n_threads=1)) as llm,
        Writer(llm, 64, 0.8) as writer,
    ):
        vocabulary = llama_cpp.llama_model_get_vocab(llm.model)
        together = list(writer.texts(jobs))
        for job, tokens, _ in together:
            if len(tokens) < job.length:  # the token that ends an answer belongs to it
                assert llama_cpp.llama_vocab_is_eog(vocabulary, tokens[-1])
        alone = [next(writer.texts([job])) for job in jobs]
    assert sum(len(tokens) > len(job.tokens) for job, tokens, _ in together) > SLOTS
    assert [job for job, *_ in together] == jobs
    for (job, tokens, states), (_, tokens_alone, states_alone) in zip(together, alone, strict=True):
        assert tokens == tokens_alone
        assert tuple(tokens[: len(job.tokens)]) == job.tokens
        assert len(job.tokens) <= len(tokens) <= max(job.length, len(job.tokens))
        assert (job.length > 0) == (states is not None)
        if states is not None:
            assert states_alone is not None
            assert len(states) == len(tokens)
            assert np.abs(states - states_alone).max() < 0.02


def test_a_batch_holds_all_texts_in_work(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where one in ten needs an answer, as held-out texts do."""
    batches: list[list[int]] = []
    decode = llama_cpp.llama_decode

    def counted(context: Any, batch: Any) -> int:
        batches.append([batch.seq_id[row][0] for row in range(batch.n_tokens)])
        return decode(context, batch)

    monkeypatch.setattr(llama_cpp, "llama_decode", counted)
    jobs = [Job((5, 6, 7), False, 0 if i % 10 else 40) for i in range(30 * SLOTS)]
    with (
        closing(MTPLlama(str(demo), depth=0, profile=False, verbose=False)) as llm,
        Writer(llm, 64, 0.8) as writer,
    ):
        assert [job for job, *_ in writer.texts(jobs)] == jobs
    # llama.cpp would compute others one after another.
    assert all(batch == list(range(SLOTS)) for batch in batches)
    assert batches


def test_held_out_texts_are_continued_greedily(demo: Path, data: Path) -> None:
    train, held = split_data(open_data(data, 256))
    assert train
    assert held
    assert all(s.start == 0 for s in train)
    with closing(MTPLlama(str(demo), depth=0, profile=False, verbose=False)) as llm:
        for sample in held:
            assert sample.start == 31
            tokens = sample.tokens.tolist()
            assert greedy_text(llm, tokens[:32], len(tokens)) == tokens
    read = {tuple(s.tokens[:32].tolist()) for s in train}
    assert not read & {tuple(s.tokens[:32].tolist()) for s in held}


@pytest.mark.parametrize("shard_bytes", [20_000, SHARD_BYTES])
def test_an_interrupted_run_goes_on(
    demo: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    """Also before the first shard is full."""
    texts = Texts((TEXT, "short", TEXT[2000:4000]))
    monkeypatch.setattr(collecting, "DataWriter", lambda f, k: DataWriter(f, k, shard_bytes))
    seen = []

    def stop(tokens: int) -> None:
        seen.append(tokens)
        if len(seen) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(demo, tmp_path, texts, SETTINGS, threads=1, progress=stop)
    assert not json.loads((tmp_path / INDEX_NAME).read_text())["finished"]
    seen.clear()
    collect(demo, tmp_path, texts, SETTINGS, threads=1, progress=seen.append)
    assert seen[0] > 0  # the first run's samples were not read again
    whole, parts = open_data(data, 256), open_data(tmp_path, 256)
    assert len(whole) == len(parts)
    for a, b in zip(whole, parts, strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert np.array_equal(a.hidden, b.hidden)


def test_a_killed_run_loses_a_minute(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slowly a trunk fills a shard, samples of more than a minute are on disk."""
    sample, now = open_data(data, 256)[0], [0.0]
    monkeypatch.setattr("mtp_gguf.train.dataset.time.monotonic", lambda: now[0])
    writer = DataWriter(tmp_path, {})
    writer.add(sample)
    assert not list(tmp_path.iterdir())
    now[0] = 61.0
    writer.add(sample)
    assert DataWriter(tmp_path, {}).samples == 2


def test_states_of_something_else_are_refused(demo: Path, data: Path) -> None:
    other = Texts((TEXT + "\n",))
    with pytest.raises(RequestError, match=r"found others \(different texts\); choose"):
        collect(demo, data, other, SETTINGS, threads=1)


@pytest.mark.parametrize("damage", ["bytes", "missing", "width"])
def test_damage_is_found(data: Path, tmp_path: Path, damage: str) -> None:
    width, words = 256, "expected the shard that data.json describes"
    for path in data.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = tmp_path / "shard-00000.safetensors"
    if damage == "bytes":
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    elif damage == "missing":
        shard.unlink()
    else:
        width, words = 128, "expected states of width 128, found"
    with pytest.raises(FormatError, match=words):
        open_data(tmp_path, width)


@pytest.mark.parametrize(
    "index",
    [
        "",
        "[" * 100_000,
        "[]",
        '{"format": 3, "key": {}, "finished": true, "shards": []}',
        '{"format": 2, "key": {}, "finished": true}',
        '{"format": 2, "key": [], "finished": true, "shards": []}',
        '{"format": 2, "key": {}, "finished": 1, "shards": []}',
        '{"format": 2, "key": {}, "finished": true, "shards": [1]}',
        '{"format": 2, "key": {}, "finished": true, "shards": [{"name": "a", "sha256": "b"}]}',
        '{"format": 2, "key": {}, "finished": true, "shards": '
        '[{"name": 1, "sha256": "b", "samples": 1, "tokens": 1}]}',
    ],
)
def test_an_index_of_another_kind(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX_NAME).write_text(index)
    for use in (lambda: open_data(tmp_path, 8), lambda: DataWriter(tmp_path, {})):
        with pytest.raises(FormatError, match="expected an index of collected states") as error:
            use()
        assert f"remove {tmp_path} to collect again" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("sequences", [[3, 0, 0]], "sequences that cover its 4 tokens"),
        ("sequences", [[5, 0, 0], [-1, 0, 0]], "sequences that cover its 4 tokens"),
        ("sequences", [[4, 4, 0]], "sequences that cover its 4 tokens"),
        ("tokens", [0, 1, -2, 3], "token ids from 0, found a negative one"),
        ("tokens", [0, 1, 2], "expected states of width 8, found"),
        ("sequences", [[4, 0, 0.5]], "expected sequences as <i4, found another tensor"),
    ],
)
def test_shards_that_contradict_themselves(
    tmp_path: Path, name: str, value: list[Any], words: str
) -> None:
    ints = np.arange(4, dtype=np.int32)
    writer = DataWriter(tmp_path, {})
    writer.add(Sample(ints, np.ones((4, 8), np.float16), 0, False))
    writer.finish()
    assert len(open_data(tmp_path, 8)) == 1
    path = tmp_path / "shard-00000.safetensors"
    arrays = load_file(path)
    arrays[name] = np.asarray(value)
    if arrays[name].dtype.kind == "i":
        arrays[name] = arrays[name].astype(np.int32)
    save_file(arrays, path)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    index["shards"][0]["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(FormatError, match=words):
        open_data(tmp_path, 8)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (Texts(("a", "")), r"pieces of text from 16 tokens on, .* found 0 in 2"),
        (Texts(("=" * 8192,)), r"a text of several tokens, found only token \d+,"),
        (Texts((TEXT[:200],)), r"pieces of text from 16 tokens on, .* found 1 in 1"),
        (Texts(prompts=("def f():\n",)), r"two or more prompts, .* found 1 in 1"),
        (Texts(prompts=(TEXT,)), r"a prompt has \d+ tokens, expected 1 to 80"),
        (Texts(prompts=("",)), "a prompt has 0 tokens"),
    ],
)
def test_texts_that_teach_nothing(demo: Path, tmp_path: Path, texts: Texts, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        collect(demo, tmp_path, texts, SETTINGS, threads=1)


def test_a_short_time_is_enough_for_a_short_training(demo: Path, tmp_path: Path) -> None:
    for name, kinds, texts in (
        ("text", 1, Texts((TEXT,))),
        ("prompts", 1, Texts(prompts=("a", "b"))),
        ("both", 2, Texts((TEXT,), ("a", "b"))),
    ):
        collect(demo, tmp_path / name, texts, SETTINGS, threads=1, seconds=0)
        train, held_out = split_data(open_data(tmp_path / name, 256))
        assert (len(train), len(held_out)) == (kinds, kinds)


def test_texts_and_answers_are_interleaved(demo: Path) -> None:
    texts, prompts = Texts((TEXT[:3000],)), Texts(prompts=("def f():\n", "class A:\n"))
    with Trunk(demo, SETTINGS, 1, 0) as trunk:
        read, answered = trunk.jobs(texts), trunk.jobs(prompts)
        both = trunk.jobs(Texts(texts.texts, prompts.prompts))
    n = len(answered)
    assert len(read) > n
    assert both[: 2 * n : 2] == read[:n]
    assert both[1 : 2 * n : 2] == answered
    assert both[2 * n :] == read[n:]


def test_what_is_held_out() -> None:
    def sample(held_out: bool, length: int = 4) -> Sample:
        return Sample(np.zeros(length, np.int32), np.zeros((length, 2), np.float16), 0, held_out)

    samples = [sample(False), sample(True), sample(True, length=2)]
    train, held = split_data(samples)
    assert (train, held) == (samples[:1], samples[1:2])
    for some in (samples[:1], samples[1:2], [samples[0], samples[2]]):
        with pytest.raises(RequestError, match="give more text"):
            split_data(some)
