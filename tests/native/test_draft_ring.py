"""A draft vocabulary that is made when a file is loaded, and its end, which follows the text."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mtp_gguf.convert.heads.draft_vocabulary import rank_by_id
from mtp_gguf.gguf_tools.files.format import Value, ValueType
from mtp_gguf.gguf_tools.heads.draft_list import required_ids
from mtp_gguf.gguf_tools.memory import draft_memory
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.native.checkpoint import Checkpoint, CheckpointKind
from mtp_gguf.native.head import Head
from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.native.session import Session
from support import places
from support.checkpoints import SPECS
from support.commands import invoke, succeed
from support.gguf_files import Rewrite
from support.models import Dial, Models
from support.native_trunk import Trunk

if TYPE_CHECKING:
    from collections.abc import Iterator

DEPTH = 3
SIZE = 120
RING = SIZE // 4
LIKE = SIZE * 3 // 8


@contextmanager
def opened(path: Path, n_seq_max: int = 1, **options: Any) -> Iterator[tuple[Session, Head]]:
    """A session whose head has a made list of SIZE tokens, unless `options` say otherwise."""
    with closing(Trunk(path, DEPTH, n_seq_max=n_seq_max)) as trunk:
        sizes = {"n_ctx": llama_cpp.llama_n_ctx_seq(trunk.context), "n_seq_max": n_seq_max}
        chosen = {"fastmtp_size": SIZE, **sizes, **options}
        with (
            Head(path, device=places.current().head, n_threads=1, **chosen) as head,
            Session(trunk.context, head, max_depth=DEPTH) as session,
        ):
            yield session, head


def generate(session: Session, prompt: list[int], n: int, seq: int = 0) -> list[int]:
    """The greedy text after a prompt, by drafts of a fixed depth."""
    session.decode(prompt, seq)
    text = [session.argmax()]
    while len(text) < n:
        text += session.step(text[-1], DEPTH, seq)
    return text[:n]


# ---------------------------------------------------------------------------------- the list


def test_a_list_is_made_of_the_special_tokens_and_then_by_id(models: Models) -> None:
    path = models.gguf("dense-untied", "Q4_K_M", "F16")
    with open_model(path) as model:
        required = required_ids(model)
    assert required
    assert required[0] > SIZE
    states = np.random.default_rng(4).standard_normal((3, 256)).astype(np.float32)
    with Head(path, fastmtp_size=SIZE) as head, Head(path, fastmtp_size=-1) as whole:
        assert (head.layout, head.n_draft_vocab, head.n_ring) == ("made", SIZE, RING + LIKE)
        assert (whole.layout, whole.n_ring) == ("none", 0)
        ids = head.draft_ids()
        assert ids.tolist() == rank_by_id(required, head.n_vocab, SIZE).ids.tolist()
        part, all_ = (h.draft([5, 6, 7], states, 1, 1, logits=True) for h in (head, whole))
    assert part.logits is not None
    assert all_.logits is not None
    assert np.array_equal(part.logits[0], all_.logits[0, ids])


def large(models: Models, n_vocab: int, hidden: int = 64) -> Path:
    """A model with a vocabulary of this size."""
    name = f"large-{n_vocab}-{hidden}"
    spec = replace(SPECS["dense-tied"], name=name, hidden=hidden, vocab_size=n_vocab)
    return models.gguf(spec, "Q8_0", "F16")


def test_only_a_large_vocabulary_has_a_list_by_default(models: Models) -> None:
    """The head and what the headers tell have the same sizes and memory."""
    sizes = {}
    for n_vocab in (32_767, 32_768):
        path = large(models, n_vocab)
        with Head(path) as head, open_model(path) as model:
            sizes[n_vocab] = (head.layout, head.n_draft_vocab, head.n_ring)
            found = model.report.in_use
            assert (found is None) == (head.layout == "none")
            if found:
                assert (found.size, found.ring) == sizes[n_vocab][1:]
                memory = draft_memory(model, model, None, 256, 1)
                # Each buffer of ggml begins at a multiple of its alignment.
                assert memory.draft_rows <= head.weight_bytes < memory.draft_rows + 256
    assert sizes == {32_767: ("none", 32_767, 0), 32_768: ("made", 8192, 2048 + 3072)}


def test_the_commands_say_what_is_drafted_over(models: Models) -> None:
    path = large(models, 32_768)
    text = "8192 tokens, by id, chosen when the file is loaded, the last 5120 follow the text"
    assert f"\ndraft vocabulary: {text}\n" in succeed("doctor", path)
    assert succeed("list-tensors", path, "--mtp").endswith(f"draft vocabulary of {text}\n")
    options = ("generate", path, "-p", "aha", "-n", 2, "--ctx", 256)
    assert (
        "mtp-gguf: drafts over 8,192 of 32,768 tokens, as the file has no list: the special ones "
        "and then by id; the last 5,120 follow the text; --fastmtp-size -1 drafts over all\n"
    ) in invoke(*options).stderr
    assert "drafts over" not in invoke(*options, "--fastmtp-size", -1).stderr


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("ids", "324 tokens, layout ids, the last 81 follow the text"),
        ("table", "324 tokens, layout table"),
    ],
)
def test_the_commands_say_how_a_stored_list_is_used(models: Models, layout: str, text: str) -> None:
    path = models.gguf(layout=layout)
    assert f"\ndraft vocabulary: {text}\n" in succeed("doctor", path)
    assert f"FastMTP {text}" in succeed("list-tensors", path, "--mtp")


# Makes malloc() keep nothing for later, which would hide how little memory there is.
NOTHING_SPARE = {
    "MALLOC_TRIM_THRESHOLD_": "4096",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_MMAP_THRESHOLD_": "65536",
}

# Loads the head with more and more memory. An argument: the path.
WITH_LITTLE_MEMORY = """
import resource
import sys
from pathlib import Path

from mtp_gguf.native.head import Head


def used():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


path = sys.argv[1]
with Head(path) as head:
    assert head.layout == "made"
    rows = head.weight_bytes
for _ in range(2):  # the first one also makes what stays
    with Head(path, fastmtp_size=-1) as whole:
        assert whole.weight_bytes < rows / 4
        least = used() + rows // 4
for part in range(96):
    resource.setrlimit(resource.RLIMIT_AS, (least + rows * part // 64, -1))
    with Head(path) as head:
        print(head.layout, head.n_draft_vocab, head.n_ring)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer reserves addresses")
def test_a_list_that_does_not_fit_gives_way_to_the_whole_vocabulary(models: Models) -> None:
    """On a CPU, which uses the matrices of the whole vocabulary where the file is mapped."""
    path = large(models, 32_768, hidden=512)
    command = [sys.executable, "-c", WITH_LITTLE_MEMORY, str(path)]
    child = subprocess.run(
        command, env=os.environ | NOTHING_SPARE, check=False, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr
    found = child.stdout.splitlines()
    assert found[0] == "none 32768 0"
    assert found[-1] == "made 8192 5120"
    assert set(found) == {found[0], found[-1]}


@pytest.mark.parametrize(
    ("layout", "n_ring", "found"),
    [("ids", 0, 324 // 4), ("ids", 7, 7), ("ids", -1, 0), ("table", 0, 0)],
)
def test_how_much_of_a_stored_list_follows_the_text(
    models: Models, layout: str, n_ring: int, found: int
) -> None:
    """Nothing if the file has only the rows of its list."""
    with Head(models.gguf(layout=layout), n_ring=n_ring) as head:
        assert (head.layout, head.n_draft_vocab) == (layout, 324)
        assert head.n_ring == found


# ---------------------------------------------------------------------------------- the ring


@places.everywhere
def test_tokens_of_the_text_can_be_drafted(dial: Dial) -> None:
    """They take the last places of the list, from the end, and have their own rows."""
    path = dial("tiny")
    following = dial.successors("tiny")
    prompt = [token for token in following if token > 2 * SIZE][: RING // 2]
    with opened(path) as (session, head), Head(path, device=places.current().head) as whole:
        before = head.draft_ids()
        assert not set(prompt) & set(before.tolist())
        text = generate(session, prompt, 9)
        after = head.draft_ids()
        kept = len(set(after.tolist()) & set(before.tolist()))
        assert kept < SIZE - len(prompt)
        assert after[: SIZE - RING].tolist() == before[: SIZE - RING].tolist()
        assert after[::-1][: len(prompt)].tolist() == prompt
        assert set(text[:-DEPTH]) <= set(after.tolist())
        states = np.random.default_rng(4).standard_normal((2, head.n_embd)).astype(np.float32)
        session.remove(0)
        part, all_ = (h.draft([5, 6], states, 1, 1, logits=True) for h in (head, whole))
    assert part.logits is not None
    assert all_.logits is not None
    assert np.abs(part.logits[0] - all_.logits[0, after]).max() < 1e-3


@places.everywhere
@pytest.mark.parametrize("layout", [None, "ids"])
def test_drafts_are_accepted_as_over_the_whole_vocabulary(
    models: Models, dial: Dial, layout: str | None
) -> None:
    """Once the text has had the tokens, most of which are not in the list."""
    path = models.gguf(dial.checkpoint("tiny", 1.0), "Q4_K_M", "F16", layout)
    cycle = list(dial.successors("tiny"))
    text, accepted = cycle[1 : RING - 1], []
    for options in ({"fastmtp_size": -1}, {}, {"n_ring": -1}):
        with opened(path, **{"fastmtp_size": 0 if layout else SIZE, **options}) as (session, _):
            assert generate(session, [*text, cycle[0]], len(text)) == text
            accepted.append(session.stats().acceptance[0])
    assert accepted[0] == accepted[1] == 1
    assert accepted[2] < 0.7


def test_the_oldest_tokens_make_room(dial: Dial) -> None:
    prompt = [token for token in dial.successors("tiny") if token > 2 * SIZE][: 2 * RING]
    with opened(dial("tiny")) as (session, head):
        session.decode(prompt)
        session.step(prompt[0], 1)  # which is read again
        ids = head.draft_ids().tolist()
        assert len(set(ids)) == SIZE
        assert set(prompt[RING + 1 :]) | {prompt[0]} <= set(ids[SIZE - RING - LIKE :])
        assert not set(prompt[1 : RING + 1]) <= set(ids)


def test_what_is_removed_can_no_longer_be_drafted(dial: Dial) -> None:
    prompt = [token for token in dial.successors("tiny") if token > 2 * SIZE][:20]
    with opened(dial("tiny")) as (session, head), opened(dial("tiny")) as (other, fresh):
        listed = head.draft_ids().tolist()
        session.decode(prompt)
        session.step(prompt[0], 1)
        session.remove(0)
        for one in (session, other):
            one.decode(prompt[:3])
            one.step(5, 1)
        assert head.draft_ids().tolist() == fresh.draft_ids().tolist()
        session.remove(0)
        session.decode([5])
        session.step(5, 1)
        assert head.draft_ids().tolist() == listed


def test_tokens_that_are_like_those_of_the_text_come(dial: Dial, rewrite: Rewrite) -> None:
    """Of its script or letters, after 32 different tokens; and they leave with the text."""
    path = dial("tiny")
    with open_model(path) as model:
        words = list(model.first.array("tokenizer.ggml.tokens") or [])
    words[256:900] = [f"w{token}" for token in range(256, 900)]
    for first, letters in ((400, "ЖДИ"), (500, "qux"), (600, "漢字語"), (700, "Grö")):
        for n in range(80):
            text = "".join(letters[n // 3**digit % 3] for digit in range(4))
            words[first + n] = byte_level(f" {text}")
    path = rewrite(path, {"tokenizer.ggml.tokens": Value(ValueType.STRING, words)})
    with opened(path) as (session, head):
        listed = head.draft_ids().tolist()
        for first in (400, 500, 600, 700):
            session.decode([*range(first, first + 31)])
            session.step(first + 30, 1)
            before = head.draft_ids().tolist()
            session.decode([*range(first + 31, first + 36)])
            session.step(first + 35, 1)
            ids = set(head.draft_ids().tolist())
            others = set(range(first + 36, first + 80))
            assert len(others & set(before)) <= 2
            assert len(others & ids) >= RING // 2
            session.remove(0)
            session.decode([5])
            session.step(5, 1)
            assert head.draft_ids().tolist() == listed
            session.remove(0)


def test_what_is_drafted_over_depends_on_the_text_alone(dial: Dial) -> None:
    """Not on drafts in between, or on other texts that were tried and left."""
    text = np.random.default_rng(8).permutation(np.arange(200, 900))[:150].tolist()
    ids = []
    with opened(dial("tiny")) as (session, head):
        for parts, other in (((150,), 0), ((20, 31, 40, 59), 0), ((60, 90), 3), ((60, 90), 100)):
            done = 0
            for part in parts:
                session.decode(text[done : done + part])
                done += part
                with session.save(CheckpointKind.HOST) as saved:
                    if other:
                        session.decode(list(range(300, 300 + other)))
                    session.step(7, DEPTH)
                    session.restore(saved)
            session.step(text[0], 1)
            ids.append(head.draft_ids().tolist())
            assert len(set(ids[-1])) == SIZE
            session.remove(0)
    assert all(each == ids[0] for each in ids)


def byte_level(text: str) -> str:
    """The text as byte-level vocabularies have it: a printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(
        chr(byte if byte in printable else 256 + others.index(byte)) for byte in text.encode()
    )


def test_sequences_share_it(dial: Dial) -> None:
    """The text of each is as alone, and a sequence that ends takes its tokens with it."""
    tokens = [token for token in dial.successors("tiny") if token > 2 * SIZE]
    prompts = [tokens[:8], tokens[40:50]]
    alone = []
    for prompt in prompts:
        with opened(dial("tiny")) as (session, _):
            alone.append(generate(session, prompt, 20))
    with opened(dial("tiny"), n_seq_max=2, fastmtp_size=2 * SIZE) as (session, head):
        assert [generate(session, prompt, 20, seq) for seq, prompt in enumerate(prompts)] == alone
        ids = set(head.draft_ids().tolist())
        assert {prompts[0][0], prompts[1][0]} <= ids
        session.remove(0, seq=0)
        session.step(alone[1][-1], 1, 1)
        ids = set(head.draft_ids().tolist())
        assert prompts[0][0] not in ids
        assert prompts[1][0] in ids


# ---------------------------------------------------------------------------------- sampling


def sampled(session: Session, text: list[int], n: int) -> list[int]:
    out = list(text)
    while len(out) < len(text) + n:
        out += session.step_sampled(out[-1])
    return out


@pytest.mark.parametrize("kind", [CheckpointKind.WHOLE, CheckpointKind.HOST])
def test_a_restored_session_draws_the_same(dial: Dial, kind: CheckpointKind) -> None:
    """Text, drafts and draft vocabulary: so it has what followed the text, in the same places."""
    path = dial("tiny", gain=0.15)
    prompt = [token for token in dial.successors("tiny") if token > 2 * SIZE][:RING]
    with opened(path) as (session, head), opened(path) as (other, restored):
        session.set_sampling(1.0, top_k=40, seed=1)
        session.decode(prompt)
        text = sampled(session, [session.sample()], 40)
        session.remove(len(prompt) + len(text) - 1)
        with session.save(kind) as saved:
            texts, ids = [], []
            for one, its_head in ((session, head), (other, restored)):
                one.set_sampling(1.0, top_k=40, seed=2)
                if kind is CheckpointKind.WHOLE:
                    with Checkpoint.from_bytes(saved.to_bytes()) as read:
                        one.restore(read)
                elif one is other:
                    continue
                texts.append(sampled(one, text[-1:], 30))
                ids.append(its_head.draft_ids().tolist())
            session.restore(saved)
            session.set_sampling(1.0, top_k=40, seed=2)
            texts.append(sampled(session, text[-1:], 30))
            ids.append(head.draft_ids().tolist())
    assert all(text == texts[0] for text in texts)
    assert all(each == ids[0] for each in ids)
