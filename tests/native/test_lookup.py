"""Drafts from the text do not change the tokens; used if they promise more than the head."""

from __future__ import annotations

import struct
import warnings
from collections import Counter
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from llama_cpp.llama_grammar import LlamaGrammar

from mtp_gguf.gguf_tools.profile import FROM_TEXT
from mtp_gguf.native import MTPLlama
from mtp_gguf.native.checkpoint import Checkpoint, CheckpointKind
from mtp_gguf.native.errors import ModelRefusedError, NativeError
from mtp_gguf.native.head import Head
from mtp_gguf.native.libraries.replay import replays
from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.native.session import Depth, Rollback, Session
from support.chi_square import far_off, two_samples
from support.commands import invoke
from support.models import Models
from support.native_trunk import Trunk, know_costs

LOOKUP = 12


def opened(
    stack: ExitStack,
    path: Path,
    *,
    depth: int = 3,
    lookup: int = LOOKUP,
    mode: Rollback = Rollback.SNAPSHOT,
    head: bool = True,
) -> Session:
    """A session that looks up, with a head unless told otherwise."""
    snapshots = max(depth, lookup) if mode is Rollback.SNAPSHOT else 0
    trunk = stack.enter_context(closing(Trunk(path, snapshots, n_seq_max=2)))
    n_ctx = llama_cpp.llama_n_ctx_seq(trunk.context)
    drafter = None
    if head:
        drafter = stack.enter_context(Head(path, n_ctx=n_ctx, n_threads=1, n_seq_max=2))
    return stack.enter_context(
        Session(
            trunk.context,
            drafter,
            max_depth=depth if head else 0,
            rollback=mode,
            max_lookup=lookup,
        )
    )


def copied_prompt(dial: Any) -> list[int]:
    """A text of the synthetic model, then its beginning again, so that the answer copies it."""
    cycle = dial.successors("tiny")
    text = [7]
    while len(text) < 60:
        text.append(cycle[text[-1]])
    return [*text, *text[:6]]


def generate(session: Session, n: int, depth: Depth = None, seq: int = 0) -> list[int]:
    tokens = [session.argmax()]
    while len(tokens) < n:
        tokens += session.step(tokens[-1], depth, seq)
    return tokens[:n]


@pytest.mark.parametrize("depth", [0, 2, "auto"])
@pytest.mark.parametrize("mode", list(Rollback))
def test_greedy_text_is_the_same(dial: Any, mode: Rollback, depth: Depth) -> None:
    cycle, prompt = dial.successors("tiny"), copied_prompt(dial)
    with ExitStack() as stack:
        session = opened(stack, dial("tiny"), mode=mode)
        session.decode(prompt)
        tokens = generate(session, 80, depth)
        stats = session.stats()
    assert [cycle[t] for t in tokens[:-1]] == tokens[1:]
    assert stats.text_cycles > 0
    assert 0 < stats.text_accepted <= stats.text_drafted
    assert stats.tokens == stats.cycles + sum(stats.accepted) + stats.text_accepted


def test_without_a_head(dial: Any) -> None:
    """A copy is drafted from the text, as many tokens at a time as pay off."""
    cycle, prompt = dial.successors("tiny"), copied_prompt(dial)
    with ExitStack() as stack:
        session = opened(stack, dial("tiny"), head=False)
        session.decode(prompt)
        session.set_costs([10.0 + i for i in range(13)], [])  # as on a machine with fast batches
        tokens = generate(session, 50)
        stats = session.stats()
    assert [cycle[t] for t in tokens[:-1]] == tokens[1:]
    assert stats.drafted == ()
    assert stats.text_accepted > 25
    assert stats.tokens == stats.cycles + stats.text_accepted


def test_novel_text_is_left_to_the_head(dial: Any) -> None:
    with ExitStack() as stack:
        session = opened(stack, dial("tiny"))
        session.decode([7])
        generate(session, 60, 3)  # a walk that meets no token twice
        stats = session.stats()
    assert stats.text_cycles == 0
    assert sum(stats.accepted) > 0


def test_removed_tokens_are_not_drafted(dial: Any) -> None:
    """After a removal the index holds what the sequence holds."""
    prompt = copied_prompt(dial)
    with ExitStack() as stack:
        session = opened(stack, dial("tiny"), mode=Rollback.CHECKPOINT)
        session.decode(prompt)
        session.remove(0)
        session.decode(prompt[:30])
        assert session.begin(prompt[30], 0) == []
        session.end(0)


@pytest.mark.parametrize("mode", [Rollback.CHECKPOINT, Rollback.HOST])
def test_a_long_draft_is_rolled_back_after_a_checkpoint(dial: Any, mode: Rollback) -> None:
    """The accepted tokens before it are decoded again, more than the head could have drafted."""
    prompt = copied_prompt(dial)
    with ExitStack() as stack:
        session = opened(stack, dial("tiny"), mode=mode)
        session.decode(prompt)
        token = session.argmax()
        for _ in range(50):  # as if learned long ago: drafts are nearly free
            session.set_costs([10.0 + i / 10 for i in range(LOOKUP + 1)], [10.0] * 4)
        drafts = session.begin(token, 0)
        assert len(drafts) > 3 + 1
        session.end(len(drafts))
        session.save(CheckpointKind.WHOLE).close()
        session.remove(session.length() - 1)
        assert session.length() == len(prompt) + len(drafts)
        assert session.step(drafts[-1], 0)[0] == dial.successors("tiny")[drafts[-1]]


def test_copies_keep_the_text(dial: Any) -> None:
    prompt = copied_prompt(dial)
    with ExitStack() as stack:
        session = opened(stack, dial("tiny"))
        session.decode(prompt)
        token = session.argmax()
        session.copy(0, 1)
        know_costs(session, LOOKUP)
        expected = session.begin(token, 0)
        session.end(0)
        assert len(expected) > 1
        know_costs(session, LOOKUP)
        copied = session.begin(token, 0, seq=1)
        session.end(0)
        assert copied == expected


def cycles(session: Session, tokens: list[int], seq: int = 0) -> list[list[int]]:
    """The drafts before each of the tokens, of which as many are accepted as are right."""
    found = []
    at = 0
    while at + 1 < len(tokens):
        know_costs(session, LOOKUP)
        drafts = session.begin(tokens[at], 0, seq)
        found.append(drafts)
        rest = tokens[at + 1 : -1]
        same = 0
        while same < min(len(drafts), len(rest)) and drafts[same] == rest[same]:
            session.row(same)
            same += 1
        session.end(same)
        at += 1 + same
    return found


def never_repeated() -> list[int]:
    """The same token before ever new ones."""
    return [token for i in range(20) for token in (1001, 1002 + i)]


def edited(prompt: list[int], every: int) -> list[int]:
    """A copy in which two new tokens replace one in `every`."""
    new = iter(sorted(set(range(100, 1000)) - set(prompt)))
    copy = []
    for i, token in enumerate(prompt):
        copy += [next(new), next(new)] if i % every == 0 else [token]
    return copy


@pytest.mark.parametrize("kind", [CheckpointKind.HOST, CheckpointKind.HEAD, CheckpointKind.WHOLE])
@pytest.mark.parametrize("head", [True, False])
def test_drafts_after_a_restore_are_those_without_it(
    dial: Any, kind: CheckpointKind, head: bool
) -> None:
    """In another session, too: the text, what was learned of it, and where a copy was left."""
    prompt = copied_prompt(dial)[:60]
    copy = edited(prompt, 12)
    left = 13 * 3 + 2  # behind the first new token, so that only the place tells what follows
    with ExitStack() as stack:
        session = opened(stack, dial("tiny"), head=head)
        session.decode([*prompt, *never_repeated()])
        cycles(session, never_repeated())  # a match of one token is wrong here
        cycles(session, copy[:left])
        saved = stack.enter_context(session.save(kind))
        rest = [*copy[left - 1 :], *never_repeated()[:4]]
        session.copy(0, 1)
        expected = cycles(session, rest, 1)
        assert sum(map(len, expected)) > 10
        if kind is CheckpointKind.HOST:
            cycles(session, [7, 8, 9, 7, 8, 9, 7])
            session.restore(saved)
            found = cycles(session, rest)  # sizes may differ: the index counted the removed tokens
            assert sum(map(len, found)) > 10
            assert abs(len(found) - len(expected)) <= 3
            return
        data = saved.to_bytes()
        other = opened(stack, dial("tiny"), head=head)
        other.decode([3, 4, 5] * 9, 1)
        cycles(other, [5, 6, 7, 8, 9], 1)
        read = stack.enter_context(Checkpoint.from_bytes(data))
        if kind is CheckpointKind.HEAD:
            with pytest.raises(NativeError, match="expected a trunk that holds its"):
                other.restore(read, 1)
            other.remove(0, 1)
            other.decode([3] * session.length(), 1)
            other.sync(1)  # as if its caller had restored the trunk's state
            other.restore(read, 1)
            assert cycles(other, rest, 1) == expected
        else:
            other.restore(read, 1)
            assert cycles(other, rest, 1) == expected
            assert cycles(other, rest[:2]) == [[]]  # the other sequence has no text


def test_checkpoints_without_a_text_are_restored(dial: Any) -> None:
    """Those of earlier versions, and of sessions that do not look up; and the other way round."""
    prompt = copied_prompt(dial)
    with ExitStack() as stack:
        session = opened(stack, dial("tiny"))
        plain = opened(stack, dial("tiny"), lookup=0)
        for source in (session, plain):
            source.decode(prompt)
        token = session.argmax()
        with session.save() as saved, plain.save() as small:
            data, without = saved.to_bytes(), small.to_bytes()
        third = before_depths(data)
        earlier = (b"mtpstat2" + third[8:], first_version(data), first_version(without))
        for given in (without, *earlier):
            with Checkpoint.from_bytes(given) as saved:
                session.restore(saved)
            assert session.begin(token, 0) == []  # nothing is known of the text before
            session.end(0)
        with Checkpoint.from_bytes(data) as saved:
            plain.restore(saved)
        assert plain.step(token, 3)


def before_depths(data: bytes) -> bytes:
    """As written before checkpoints held the choice of depths: its size and bytes are missing."""
    (n,) = struct.unpack_from("<q", data, 88)
    assert n > 0
    return b"mtpstat3" + data[8:88] + data[104 : len(data) - n]


def first_version(data: bytes) -> bytes:
    """As written before checkpoints held a text: its size and the text itself are missing."""
    data = before_depths(data)
    (n,) = struct.unpack_from("<q", data, 72)
    return b"mtpstat1" + data[8:72] + data[88 : len(data) - n]


NAN = struct.unpack("<q", struct.pack("<d", float("nan")))[0]
MANY = struct.unpack("<q", struct.pack("<d", 1e9))[0]
TWO = struct.unpack("<q", struct.pack("<d", 2.0))[0]
PLACE, RECORDS, TOKENS = 0, 24, 24 + 6 * 128  # in the text of a checkpoint


@pytest.mark.parametrize(
    ("offset", "value", "text"),
    [
        (PLACE, 60, "a place among its 60 tokens or none, found 60"),
        (PLACE, -2, "found -2"),
        (PLACE, 2**62, "found 4611686018427387904"),
        (PLACE + 8, -1, r"\(-1 right"),
        (PLACE + 8, 61, r"\(61 right"),
        (PLACE + 16, 9, "9 wrong"),
        (RECORDS, NAN, "counts of right drafts up to those of all"),
        (RECORDS + 8, NAN, "counts of right drafts up to those of all"),
        (RECORDS + 128, TWO, "counts of right drafts up to those of all"),
        (RECORDS + 5 * 128 + 8, MANY, "counts of right drafts up to those of all"),
        (TOKENS, -1, "token 0: expected 0 to 2147483647, found -1"),
        (None, b"abc", r"bytes after its header, found"),
        (None, 4, r"expected 792 bytes and those of 0 to 60 tokens, found 1036 bytes"),
        (None, -1, r"expected 792 bytes and those of 0 to 60 tokens, found 1031 bytes"),
        (None, -300, r"expected 792 bytes and those of 0 to 60 tokens, found 732 bytes"),
    ],
)
def test_damaged_texts_are_refused(
    dial: Any, saved_text: bytes, offset: int | None, value: Any, text: str
) -> None:
    (n,) = struct.unpack_from("<q", saved_text, 72)
    data = bytearray(before_depths(saved_text))  # which ends with the text
    if isinstance(value, bytes):
        data += value
    elif offset is None:  # another size of the text, in the header, too
        struct.pack_into("<q", data, 72, n + value)
        data = data[:value] if value < 0 else data + bytes(value)
    else:
        struct.pack_into("<q" if offset < TOKENS else "<i", data, len(data) - n + offset, value)
    with pytest.raises(ModelRefusedError, match=f"^checkpoint: .*{text}") as error:
        Checkpoint.from_bytes(bytes(data))
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def saved_text(dial: Any) -> bytes:
    with ExitStack() as stack:
        session = opened(stack, dial("tiny"), head=False)
        session.decode(copied_prompt(dial)[:60])
        with session.save() as saved:
            return saved.to_bytes()


def test_tokens_of_another_vocabulary_are_refused(dial: Any, saved_text: bytes) -> None:
    data = bytearray(before_depths(saved_text))
    struct.pack_into("<i", data, len(data) - 4, 1024)
    with ExitStack() as stack:
        session = opened(stack, dial("tiny"), head=False)
        session.decode([5, 6, 7])
        with (
            Checkpoint.from_bytes(bytes(data)) as saved,
            pytest.raises(ModelRefusedError, match="token 59: expected 0 to 1023, found 1024"),
        ):
            session.restore(saved)
        assert session.length() == 3


@pytest.mark.parametrize("with_head", [True, False])
def test_states_of_mtp_llama_keep_the_text(dial: Any, tmp_path: Path, with_head: bool) -> None:
    path = dial("tiny")
    prompt = copied_prompt(dial)
    options: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "profile": False, "lookup": True}
    accepted = []
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                closing(MTPLlama(str(path), depth=2 if with_head else 0, **options))
            )
            for _ in range(2)
        )
        first.eval(prompt[:-1])
        second.load_state(first.save_state())
        for llm in (first, second):
            for _ in range(50):
                llm.session.set_costs([10.0 + i / 10 for i in range(15)], [10.0] * 4)
            drafts = llm.session.begin(prompt[-1], 0)
            llm.session.end(0)
            accepted.append(drafts)
    assert accepted[0] == accepted[1]
    assert len(accepted[0]) > 1


@pytest.mark.thorough
@pytest.mark.parametrize("draws", [400, pytest.param(20_000, marks=pytest.mark.slow)])
def test_sampling_by_rejection_keeps_the_distribution(dial: Any, draws: int) -> None:
    """A draft from the text is accepted with its probability, and replaced by the residual.

    pytest -m slow tests/native/test_lookup.py compares 20,000 draws.
    """
    prompt = copied_prompt(dial)
    path = dial("tiny", gain=0.15)
    sides = []
    for lookup in (0, 4):
        with ExitStack() as stack:
            session = opened(stack, path, depth=0, lookup=lookup, head=False)
            session.set_sampling(1.0, top_k=6, seed=5 + lookup)
            for _ in range(50):  # as if learned long ago: drafts are free
                session.set_costs([10.0] * 5, [])
            seen: Counter[tuple[int, ...]] = Counter()
            for _ in range(draws):
                session.remove(0)
                session.decode(prompt)
                text = [session.sample()]
                while len(text) < 3:
                    session.set_costs([10.0] * 5, [])
                    text += session.step_sampled(text[-1], 0)
                seen[tuple(text[:3])] += 1
            stats = session.stats()
            sides.append(seen)
    assert stats.text_drafted > draws
    assert 0.1 < stats.text_accepted / stats.text_drafted < 0.9
    for part in (slice(0, 1), slice(1, 2), slice(2, 3), slice(0, 3)):
        counts: list[Counter[Any]] = [Counter(), Counter()]
        for side, of_part in zip(sides, counts, strict=True):
            for tokens, count in side.items():
                of_part[tokens[part]] += count
        statistic, freedom = two_samples(*counts)
        assert freedom > 1
        assert not far_off(statistic, freedom), (part, statistic, freedom)


@pytest.mark.parametrize("lookup", [-1, 17])
def test_wrong_sizes_are_refused(dial: Any, lookup: int) -> None:
    with ExitStack() as stack, pytest.raises(NativeError, match="max_lookup: expected 0 to 16"):
        opened(stack, dial("tiny"), lookup=lookup)


def test_snapshots_must_hold_the_drafts(dial: Any) -> None:
    with (
        closing(Trunk(dial("tiny"), 3)) as trunk,
        pytest.raises(NativeError, match="n_rs_seq of 12 or more, found 3"),
    ):
        Session(trunk.context, None, max_depth=0, max_lookup=LOOKUP)


@pytest.mark.parametrize("with_head", [True, False])
def test_mtp_llama_looks_up(dial: Any, tmp_path: Path, with_head: bool) -> None:
    """The same text with and without lookup, also for a file that has no head."""
    path = dial("tiny")
    if not with_head:
        assert invoke("strip", path, "-o", tmp_path / "trunk.gguf").exit_code == 0
        path = tmp_path / "trunk.gguf"
    prompt = copied_prompt(dial)
    texts: list[list[int]] = []
    stats = []
    for lookup in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a file without a head is said to have none
            llm = MTPLlama(str(path), n_ctx=256, n_threads=1, lookup=lookup, profile=False)
        with closing(llm):
            stream = llm.generate(prompt, temp=0.0)
            origins = []
            texts.append([])
            for token in islice(stream, 60):
                texts[-1].append(token)
                origins.append(llm.token_origin)
            stream.close()
            stats.append(llm.mtp_stats)
    assert texts[0] == texts[1]
    assert stats[0].text_cycles == 0
    assert stats[1].text_accepted > 0
    assert 0 < origins.count(FROM_TEXT) <= stats[1].text_accepted  # the last cycle may be cut off


# As llama_cpp.Llama's own completions take them.
REPEATED = "red green blue grey " * 12  # the demo model goes on with the repetition
COMPLETIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "chain": {"temperature": 0.6, "top_k": 20},
    "penalties": {"temperature": 0.6, "repeat_penalty": 1.02, "frequency_penalty": 0.02},
    "grammar": {"temperature": 0.6, "grammar": "root ::= [a-z ]*"},
}


@pytest.mark.parametrize("quant", ["Q4_K_M", pytest.param("F16", marks=pytest.mark.slow)])
def test_completions_are_those_of_no_drafting(models: Models, quant: str) -> None:
    """With a sampler's chain, penalties and a grammar, seed by seed; also with exact.

    pytest -m slow tests/native/test_lookup.py also runs F16 weights.
    """
    path = models.gguf("demo", quant, "F16")
    settings: list[dict[str, Any]] = [
        {"depth": 0, "lookup": False},
        {"lookup": True, "rejection": False},
        {"lookup": True, "rejection": False, "exact": True},
    ]
    texts = []
    for setting in settings:
        with closing(
            MTPLlama(str(path), n_ctx=256, n_threads=1, profile=False, flash_attn=True, **setting)
        ) as llm:
            for how, options in COMPLETIONS.items():
                for seed in range(2):
                    for _ in range(50):  # as if learned long ago: drafts are nearly free
                        llm.session.set_costs([10.0 + i / 10 for i in range(15)], [10.0] * 4)
                    given = dict(options)
                    if "grammar" in given:
                        given["grammar"] = LlamaGrammar.from_string(given["grammar"], verbose=False)
                    done: Any = llm.create_completion(REPEATED, max_tokens=24, seed=seed, **given)
                    texts.append((how, seed, done["choices"][0]["text"]))
            assert (llm.mtp_stats.text_accepted > 10) is bool(setting["lookup"])
    n = len(texts) // len(settings)
    assert [texts[i : i + n] for i in range(n, len(texts), n)] == [texts[:n]] * (len(settings) - 1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, True),
        ({"depth": "auto", "exact": True}, True),
        ({"lookup": False}, False),
        ({"depth": 2}, False),  # its draws must not depend on measured times
        ({"depth": 0}, False),
        ({"rollback": "checkpoint"}, False),  # each cycle would copy the state
        ({"depth": 2, "lookup": True}, True),
    ],
    ids=str,
)
def test_on_by_default_where_depth_is_automatic_and_rollback_needs_no_snapshots(
    dial: Any, arguments: dict[str, Any], expected: bool
) -> None:
    expected = expected and (replays("qwen35", 0) or "lookup" in arguments)
    prompt = copied_prompt(dial)
    with closing(
        MTPLlama(str(dial("tiny")), n_ctx=256, n_threads=1, profile=False, **arguments)
    ) as llm:
        for _ in range(50):  # as if learned long ago: drafts from the text are nearly free
            llm.session.set_costs([10.0 + i / 10 for i in range(15)], [10.0] * 4)
        list(islice(llm.generate(prompt, temp=0.0), 60))
        assert (llm.mtp_stats.text_accepted > 0) is expected
