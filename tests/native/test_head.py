"""The head layer: drafts against the NumPy reference and llama.cpp, caches, layouts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_gguf.convert.families.target_model import HeadChoice
from mtp_gguf.gguf_tools.files.format import open_gguf
from mtp_gguf.gguf_tools.heads.fastmtp import IDS_KEY
from mtp_gguf.native.errors import NativeError
from mtp_gguf.native.head import Draft, SequenceTask
from mtp_gguf.native.head import Head as AnyHead
from support import places
from support.generation import random_tokens
from support.gguf_files import Rewrite
from support.models import Models
from support.reference_model import ReferenceModel
from support.upstream.llama_mtp import LlamaMtp

# Logits have a standard deviation of 1.1; a wrong norm, position or hidden state shows as 0.05 to
# 5. Measured: 0.002 with F32 weights, all of it from keys and values kept in F16.
CACHE_TOLERANCE = 0.01
# Against llama.cpp on the same quantized file, root mean square: activations are rounded to 8 bits
# before each product, so that a last bit can become a step of a block's scale, and the next step
# starts from there. Measured: up to 0.05.
QUANTIZED_RMS_TOLERANCE = 0.08
# On a GPU rounding can make a router select another expert, which moves all later steps. Measured:
# up to 0.27.
OTHER_EXPERT_RMS_TOLERANCE = 0.4


class Head(AnyHead):
    """On the test's device, with one thread.

    Tiny products gain nothing from threads, and lose much where other tests run at the same time.
    """

    def __init__(self, path: Path, **options: Any) -> None:
        super().__init__(path, **{"n_threads": 1, "device": places.current().head, **options})


DEPTH = 4
STATUS = Path("/proc/self/statm")
TOKENS = random_tokens(33, 11, 900)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(STATUS.read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def rows_for(hidden: np.ndarray, n: int) -> np.ndarray:
    """Hidden states for rows 0 .. n - 1: zeros first, as llama.cpp's draft-mtp has it."""
    return np.concatenate([np.zeros((1, hidden.shape[1])), hidden[: n - 1]]).astype(np.float32)


def draft_all(head: AnyHead, hidden: np.ndarray, tokens: list[int] = TOKENS, seq: int = 0) -> Draft:
    return head.draft(tokens, rows_for(hidden, len(tokens)), 0, DEPTH, seq, logits=True)


def logits_of(draft: Draft) -> np.ndarray:
    assert draft.logits is not None
    return draft.logits


@pytest.mark.sample(3)
@places.everywhere
@pytest.mark.parametrize(
    "spec", ["dense-tied", "dense-untied", "dense-ragged", "moe-fused", "moe-mixed", "next-fused"]
)
def test_drafts_equal_the_reference(models: Models, spec: str) -> None:
    reference: ReferenceModel = models.reference(spec)
    hidden = reference.trunk(TOKENS[:-1])[1]
    with Head(models.gguf(spec)) as head:
        draft = draft_all(head, hidden)
    # Follow our own drafts, so that a near tie does not make later steps incomparable.
    want_ids, want = reference.draft(TOKENS, hidden, DEPTH, follow=draft.tokens)
    assert np.abs(logits_of(draft) - want).max() < CACHE_TOLERANCE
    assert draft.tokens == want_ids
    chances = np.exp(want - want.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    assert np.allclose(draft.probabilities, chances.max(1), rtol=0.02)


def drafted_twice(path: Path) -> tuple[Draft, np.ndarray]:
    """Our draft, and the logits of llama.cpp's after the same tokens."""
    with LlamaMtp(path) as upstream, Head(path) as head:
        hidden = upstream.trunk(TOKENS[:-1])[1]
        draft = draft_all(head, hidden)
        return draft, upstream.draft(TOKENS, hidden, DEPTH, follow=draft.tokens)[1]


@pytest.mark.sample(2)
@places.everywhere
@pytest.mark.parametrize("head_type", ["F16", "BF16", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("spec", ["dense-untied", "moe-mixed", "next-unfused"])
def test_drafts_equal_llama_cpp_at_every_type(models: Models, spec: str, head_type: str) -> None:
    path = models.gguf(spec, "Q4_K_M", head_type)
    draft, want = drafted_twice(path)
    moved = np.sqrt(np.mean((logits_of(draft) - want) ** 2, axis=1))
    if places.current() == places.CPU:
        assert np.sqrt(np.mean(moved**2)) < QUANTIZED_RMS_TOLERANCE
    else:
        assert moved[0] < QUANTIZED_RMS_TOLERANCE
        assert moved.max() < OTHER_EXPERT_RMS_TOLERANCE


@places.everywhere
def test_rope_scaling_is_that_of_the_metadata(models: Models) -> None:
    draft, want = drafted_twice(models.gguf("Qwen3.5-1.5M-Chat-v1.1"))  # YaRN
    assert np.abs(logits_of(draft) - want).max() < CACHE_TOLERANCE


# ------------------------------------------------------------------------------ the cache


@pytest.fixture
def hidden(models: Models) -> np.ndarray:
    return models.reference("dense-tied").trunk(TOKENS)[1].astype(np.float32)


@places.everywhere
def test_feeding_in_pieces_is_feeding_at_once(models: Models, hidden: np.ndarray) -> None:
    """And drafts leave nothing behind: feeding on after a draft is as if it had not been."""
    path = models.gguf()
    rows = rows_for(hidden, len(TOKENS))
    with Head(path) as head:
        whole = draft_all(head, hidden)
    with Head(path, n_batch=17) as head:
        head.feed(TOKENS[:2], rows[:2], 0)
        assert head.next_position() == 2
        head.feed(TOKENS[2:22], rows[2:22], 2)  # more rows than a graph takes
        for start, stop in ((22, 23), (23, 26), (26, 27)):
            head.draft(TOKENS[start:stop], rows[start:stop], start, 5)
        pieces = head.draft(TOKENS[27:], rows[27:], 27, DEPTH, logits=True)
        assert head.next_position() == len(TOKENS)
    # Not bit by bit: ggml multiplies one row and many with different kernels.
    assert pieces.tokens == whole.tokens
    assert np.abs(logits_of(pieces) - logits_of(whole)).max() < CACHE_TOLERANCE


@places.everywhere
def test_rollback_and_refeed_give_the_same_bits(models: Models, hidden: np.ndarray) -> None:
    rows = rows_for(hidden, len(TOKENS))
    with Head(models.gguf()) as head:
        head.feed(TOKENS[:20], rows[:20], 0)
        first = head.draft(TOKENS[20:], rows[20:], 20, DEPTH, logits=True)
        head.rollback(20)
        assert head.next_position() == 20
        head.draft(TOKENS[:3], rows[1:4], 20, 2)  # another continuation
        head.rollback(20)
        second = head.draft(TOKENS[20:], rows[20:], 20, DEPTH, logits=True)
        assert np.array_equal(logits_of(first), logits_of(second))
        head.rollback(0)
        assert head.next_position() == 0
        head.feed(TOKENS[:20], rows[:20], 0)
        third = head.draft(TOKENS[20:], rows[20:], 20, DEPTH, logits=True)
        assert np.array_equal(logits_of(first), logits_of(third))


@places.everywhere
def test_a_sequence_can_start_at_any_position(models: Models, hidden: np.ndarray) -> None:
    """Without the row of zeros at position 0, as transformers has it."""
    reference = models.reference("dense-tied")
    want = reference.draft(TOKENS, hidden, DEPTH, zero_row=False)
    with Head(models.gguf()) as head:
        got = head.draft(TOKENS[1:], hidden[: len(TOKENS) - 1], 1, DEPTH, logits=True)
        assert head.next_position() == len(TOKENS)
    assert got.tokens == want[0]
    assert np.abs(logits_of(got) - want[1]).max() < CACHE_TOLERANCE


@pytest.mark.sample(1)
@places.everywhere
@pytest.mark.parametrize("length", [255, 256, 257, 600])
def test_caches_of_more_than_one_bucket(models: Models, length: int) -> None:
    reference = models.reference("dense-tied")
    tokens = random_tokens(length, 5, 900)
    hidden = reference.trunk(tokens[:-1])[1]
    with Head(models.gguf(), n_ctx=length) as head:
        draft = draft_all(head, hidden, tokens)
    want = reference.draft(tokens, hidden, DEPTH, follow=draft.tokens)[1]
    assert np.abs(logits_of(draft) - want).max() < CACHE_TOLERANCE


@places.everywhere
def test_sequences_that_grow_side_by_side(models: Models) -> None:
    """Each grows on its own, keeps its rows, and drafts bit for bit as it does alone."""
    length, piece = 1200, 40
    starts = {0: 0, 1: 300, 2: 7}  # of the sequences, which pass each power of two at another time
    states = np.random.default_rng(9)
    tokens = random_tokens(length, 6, 900)

    def grow(head: AnyHead, seq: int, at: int) -> np.ndarray:
        part = slice(at, at + piece)
        return logits_of(
            head.draft(tokens[part], rows[part], starts[seq] + at, 2, seq, logits=True)
        )

    with Head(models.gguf(), n_ctx=length + 300, n_seq_max=3) as head:
        rows = states.standard_normal((length, head.n_embd)).astype(np.float32)
        together: dict[int, list[np.ndarray]] = {seq: [] for seq in starts}
        for at in range(0, length, piece):
            for seq in starts:
                together[seq].append(grow(head, seq, at))
        kept = {seq: head.rows(seq) for seq in starts}
    for seq in starts:
        with Head(models.gguf(), n_ctx=length + 300, n_seq_max=3) as head:
            alone = [grow(head, seq, at) for at in range(0, length, piece)]
            assert head.rows(seq) == kept[seq]
        assert np.array_equal(alone, together[seq])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("spec", "head_type", "layout", "n_seq", "n_rows"),
    [
        # Bits depend on the batch from 16 rows on, except for k-quants.
        ("dense-tied", "F16", "", 3, (1, 2, 5)),
        ("dense-untied", "Q8_0", "ids", 3, (1, 2, 5)),
        ("moe-mixed", "F16", "ids", 3, (1, 2, 5)),
        ("dense-untied", "Q4_K", "table", 5, (1, 2, 4, 30)),
        ("moe-fused", "Q6_K", "", 5, (1, 2, 4, 30)),
    ],
)
def test_sequences_in_one_graph_draft_as_alone(
    models: Models, spec: str, head_type: str, layout: str, n_seq: int, n_rows: tuple[int, ...]
) -> None:
    """Bit for bit, whatever depth, rows and length the others have."""
    path = models.gguf(spec, "Q4_K_M", head_type, layout=layout)
    draw = np.random.default_rng(4)
    cycles = 24
    starts = [0, 240, 1, 500, 9][:n_seq]  # some pass a bucket of the cache
    ends = list(starts)
    with (
        Head(path, n_ctx=2048, n_seq_max=n_seq) as together,
        Head(path, n_ctx=2048, n_seq_max=n_seq) as alone,
    ):
        for cycle in range(cycles):
            drafting = [seq for seq in range(n_seq) if draw.random() < 0.7] or [cycle % n_seq]
            draw.shuffle(drafting)
            tasks = []
            for seq in drafting:
                rows = int(draw.choice(n_rows))
                tokens = [int(token) for token in draw.integers(900, size=rows)]
                hidden = draw.standard_normal((rows, together.n_embd)).astype(np.float32)
                depth = int(draw.integers(1, DEPTH + 1))
                tasks.append(SequenceTask(tokens, hidden, ends[seq], depth, seq))
                ends[seq] += rows
            drafts = together.draft_batch(tasks)
            assert drafts == [
                alone.draft(task.tokens, states, task.first, task.depth, task.seq)
                for task in tasks
                if (states := task.hidden) is not None
            ]
            for seq in drafting:
                assert together.next_position(seq) == ends[seq]
            if cycle % 5 == 4:  # some rows were rejected
                ends[drafting[0]] -= 1
                for head in (together, alone):
                    head.rollback(ends[drafting[0]], drafting[0])
        assert all(together.rows(seq) == alone.rows(seq) for seq in range(n_seq))


@pytest.mark.skipif(not STATUS.exists(), reason="no /proc here")
@pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer keeps what is freed")
def test_a_cache_takes_memory_as_it_fills(models: Models, hidden: np.ndarray) -> None:
    """Of many long sequences, those take memory that have rows, and no more than twice as much."""
    before = resident()
    with Head(models.gguf(), n_ctx=1 << 17, n_seq_max=16) as head:
        assert head.cache_bytes > 1 << 30
        assert resident() - before < 100 << 20
        row = head.cache_bytes // 16 // ((1 << 17) + 256)
        draft_all(head, hidden)
        states = np.ones((20_000, head.n_embd), np.float32)  # resident, unlike zeros
        first = resident()
        head.feed([1] * len(states), states, 0, seq=5)
        assert resident() - first < 2 * len(states) * row + (20 << 20)
        again = draft_all(head, hidden, seq=7)
        assert np.array_equal(logits_of(again), logits_of(draft_all(head, hidden, seq=9)))


# ------------------------------------------------------------------------ draft vocabulary


def stored_ids(path: Path) -> list[int]:
    with open_gguf(path) as file:
        if (listed := file.array(IDS_KEY)) is not None:
            return [int(i) for i in listed]
        d2t = file.by_name["d2t"]
        return np.frombuffer(file.source.read(d2t.offset, d2t.nbytes), np.int64).tolist()


@pytest.mark.sample(3)
@places.everywhere
@pytest.mark.parametrize("layout", ["ids", "table", "sidecar"])
@pytest.mark.parametrize("spec", ["dense-tied", "dense-untied", "moe-fused"])
def test_draft_vocabularies_draft_what_the_reference_does_among_them(
    models: Models, spec: str, layout: str
) -> None:
    reference = models.reference(spec)
    hidden = reference.trunk(TOKENS[:-1])[1]
    choice = HeadChoice.ALONE if layout == "sidecar" else HeadChoice.WITH_TRUNK
    path = models.gguf(spec, layout=layout, choice=choice)
    with Head(path) as head:
        ids = head.draft_ids()
        assert head.layout == layout
        assert head.n_draft_vocab == len(ids) < head.n_vocab == reference.vocab_size
        assert ids.tolist() == stored_ids(path)
        draft = draft_all(head, hidden)
    want = reference.draft(TOKENS, hidden, DEPTH, follow=draft.tokens)[1][:, ids]
    assert np.abs(logits_of(draft) - want).max() < CACHE_TOLERANCE
    assert draft.tokens == ids[want.argmax(1)].tolist()


@places.everywhere
def test_a_prefix_of_a_ranked_list(models: Models, hidden: np.ndarray) -> None:
    for layout in ("ids", "table"):
        path = models.gguf(layout=layout)
        with Head(path) as whole, Head(path, fastmtp_size=37) as part:
            assert part.draft_ids().tolist() == whole.draft_ids()[:37].tolist()
            a, b = draft_all(whole, hidden), draft_all(part, hidden)
        assert np.array_equal(logits_of(b)[0], logits_of(a)[0, :37])
    with Head(models.gguf(layout="ids"), fastmtp_size=-1) as head:
        assert (head.layout, head.n_draft_vocab) == ("none", 1024)
        assert head.draft_ids().tolist() == list(range(1024))


@places.everywhere
def test_a_quantized_row_is_gathered_exactly(models: Models, hidden: np.ndarray) -> None:
    path = models.gguf("dense-untied", "Q4_K_M", "F16", layout="ids")
    with Head(path) as short, Head(path, fastmtp_size=-1) as whole:
        ids = short.draft_ids()
        a, b = draft_all(short, hidden), draft_all(whole, hidden)
    assert np.array_equal(logits_of(a)[0], logits_of(b)[0, ids])


def test_nothing_of_the_file_is_copied_on_the_cpu_without_a_list(models: Models) -> None:
    with Head(models.gguf()) as head:
        assert head.weight_bytes == 0
        assert head.mapped_bytes > 1 << 20
        assert head.tied


@places.everywhere
def test_own_embedding_and_head_of_the_block(
    models: Models, rewrite: Rewrite, hidden: np.ndarray
) -> None:
    """nextn.embed_tokens and nextn.shared_head_head shadow the model's."""
    path = models.gguf()
    with open_gguf(path) as file:
        stored = file.by_name["token_embd.weight"]
        table = np.frombuffer(file.source.read(stored.offset, stored.nbytes), np.float32)
    table = table.reshape(stored.shape[1], stored.shape[0])
    other = {"nextn.embed_tokens": table * 2, "nextn.shared_head_head": table[::-1].copy()}
    added = {
        f"blk.4.{name}.weight": (stored.shape, stored.type, array.tobytes())
        for name, array in other.items()
    }
    both = rewrite(path, tensors=added)
    with Head(path) as plain, Head(both) as head:
        assert (plain.tied, head.tied) == (True, False)
        a, b = draft_all(plain, hidden), draft_all(head, hidden)
    # enorm takes the factor of two away, up to its epsilon.
    assert np.abs(logits_of(a)[0] - logits_of(b)[0, ::-1]).max() < CACHE_TOLERANCE
    with LlamaMtp(both) as upstream:
        want = upstream.draft(TOKENS, hidden, DEPTH, follow=b.tokens)[1]
    assert np.abs(logits_of(b) - want).max() < CACHE_TOLERANCE


@places.everywhere
def test_not_finite_hidden_states_leave_drafts_in_range(models: Models, hidden: np.ndarray) -> None:
    rows = rows_for(hidden, len(TOKENS))
    rows[-1] = np.nan
    with Head(models.gguf(layout="ids")) as head:
        assert head.draws
        draft = head.draft(TOKENS, rows, 0, DEPTH)
        assert set(draft.tokens) <= set(head.draft_ids().tolist())


@places.everywhere
@pytest.mark.parametrize("layout", ["", "ids"])
def test_of_equal_logits_the_lowest_index_is_drafted(
    models: Models, rewrite: Rewrite, hidden: np.ndarray, layout: str
) -> None:
    """The rows of the first draft are also those of a lower and two higher tokens."""
    path = models.gguf("dense-untied", layout=layout)
    with Head(path) as head:
        ids = head.draft_ids().tolist()
        first = draft_all(head, hidden)
    index = ids.index(first.tokens[0])
    assert 3 < index < len(ids) - 40
    with open_gguf(path) as file:
        stored = file.by_name["output.weight"]
        data = file.source.read(stored.offset, stored.nbytes)
    table = np.frombuffer(data, np.uint8).reshape(stored.shape[1], -1).copy()
    equal = [3, index, index + 1, index + 37]
    table[[ids[i] for i in equal]] = table[ids[index]]
    twins = rewrite(path, tensors={"output.weight": (stored.shape, stored.type, table.tobytes())})
    rows = rows_for(hidden, len(TOKENS))
    with Head(twins) as head:
        alone = draft_all(head, hidden)
        tasks = [SequenceTask(TOKENS, rows, 0, DEPTH, 0)]
        head.rollback(0)
        batch = head.draft_batch(tasks)[0]
    logits = logits_of(alone)[0]
    assert np.flatnonzero(logits == logits.max()).tolist() == equal
    assert alone.tokens[0] == batch.tokens[0] == ids[3]
    assert alone.probabilities[0] < first.probabilities[0]


# --------------------------------------------------------------------- graphs that repeat


def slots_that_come_and_go(head: AnyHead, cycles: int, depth: int) -> Iterator[list[SequenceTask]]:
    """Cycles of texts of 70 to 1,000 tokens, between which a slot is idle for a while."""
    draw = np.random.default_rng(1)
    ids = head.draft_ids()

    def rows(n: int) -> tuple[list[int], np.ndarray]:
        states = draw.standard_normal((n, head.n_embd)).astype(np.float32)
        return draw.choice(ids, n).tolist(), states

    ends, left, idle = ([0] * head.n_seq_max for _ in range(3))
    for _ in range(cycles):
        tasks = []
        for seq in range(head.n_seq_max):
            if idle[seq] > 0:
                idle[seq] -= 1
                continue
            if left[seq] <= 0:
                ends[seq], left[seq] = int(draw.integers(20, 600)), int(draw.integers(50, 400))
                head.rollback(0, seq)
                head.feed(*rows(ends[seq]), 0, seq)
            n = int(draw.integers(1, depth + 2))
            tasks.append(SequenceTask(*rows(n), ends[seq], depth, seq))
            ends[seq], left[seq] = ends[seq] + n, left[seq] - n
            if left[seq] <= 0:
                idle[seq] = int(draw.integers(40))
        if tasks:
            yield tasks


@places.there
def test_slots_that_come_and_go_share_graphs(models: Models) -> None:
    """Where a graph is built, its launches are recorded anew, too."""
    with Head(models.gguf(layout="ids"), n_ctx=2048, n_seq_max=4) as head:
        for tasks in slots_that_come_and_go(head, 200, 2):
            head.draft_batch(tasks)
        built = head.built_graphs()
    print(f"{built} graphs built in 200 cycles")
    assert built < 50


@places.everywhere
def test_a_cache_that_was_longer_needs_no_other_graph(models: Models) -> None:
    with Head(models.gguf(), n_ctx=1024) as head:
        rows = np.zeros((600, head.n_embd), np.float32)
        built = []
        for n in (20, 600, 20):
            head.rollback(0)
            head.feed([5] * n, rows[:n], 0)
            before = head.built_graphs()
            head.draft([5], rows[:1], n, DEPTH)
            built.append(head.built_graphs() - before)
    assert built == [1, 1, 0]


@places.everywhere
def test_idle_sequences_keep_their_rows_and_drafts(models: Models) -> None:
    """Also while they fill a place in a graph, empty, full or in between."""
    draw = np.random.default_rng(3)
    with Head(models.gguf(layout="ids"), n_ctx=256, n_seq_max=4) as head:

        def rows(n: int) -> tuple[list[int], np.ndarray]:
            states = draw.standard_normal((n, head.n_embd)).astype(np.float32)
            return draw.choice(head.draft_ids(), n).tolist(), states

        tokens, states = rows(256)
        head.feed(tokens, states, 0, 1)  # full
        last = SequenceTask(tokens[-1:], states[-1:], 255, 3, 1)
        head.rollback(255, 1)
        alone = head.draft_batch([last])
        kept = head.rows(1)
        for end in (0, 2, 4):  # sequence 2 is empty at first
            tasks = [SequenceTask(*rows(2), end, 3, seq) for seq in (0, 3)]
            assert all(len(draft.tokens) == 3 for draft in head.draft_batch(tasks))
        assert head.rows(1) == kept
        assert [head.next_position(seq) for seq in range(4)] == [6, 256, 0, 6]
        head.rollback(255, 1)
        assert head.draft_batch([last]) == alone
        first = SequenceTask(tokens[:2], states[:2], 0, 3, 2)
        drafts = head.draft_batch([first])[0]
        with Head(models.gguf(layout="ids"), n_ctx=256) as other:
            wanted = other.draft_batch([replace(first, seq=0)])[0]
        assert np.isfinite(drafts.probabilities).all()
        assert drafts.tokens == wanted.tokens


@places.there
def test_masks_are_made_on_the_device_whatever_the_context(models: Models) -> None:
    """llama-server does not know the length of the context when it loads the head."""
    for n_ctx in (512, 1 << 24):
        with Head(models.gguf(), n_ctx=n_ctx) as head:
            assert "UNARY:ABS" in head.ops()


# ------------------------------------------------------------------------------- arguments


def test_arguments_are_checked(models: Models, hidden: np.ndarray) -> None:
    rows = rows_for(hidden, len(TOKENS))
    with Head(models.gguf(), n_ctx=40, n_seq_max=2) as head:
        head.feed(TOKENS[:4], rows[:4], 0)

        def refused(text: str, *args: Any, **kwargs: Any) -> None:
            with pytest.raises(NativeError, match=text):
                head.draft(*args, **kwargs)
            assert head.next_position() == 4

        refused("seq: expected 0 to 1, found 2", TOKENS[:1], rows[:1], 4, 1, 2)
        refused("seq: expected 0 to 1, found -1", TOKENS[:1], rows[:1], 4, 1, -1)
        refused("depth: expected 1 to 16, found 0", TOKENS[:1], rows[:1], 4, 0)
        refused("depth: expected 1 to 16, found 17", TOKENS[:1], rows[:1], 4, 17)
        refused("n_rows: expected 1 to 40, found 0", [], rows[:0], 4, 1)
        refused("next position 4 of sequence 0, found 5", TOKENS[:1], rows[:1], 5, 1)
        refused("next position 4 of sequence 0, found 3", TOKENS[:1], rows[:1], 3, 1)
        refused("first: expected 0 to 39, found -1", TOKENS[:1], rows[:1], -1, 1)
        refused(r"tokens\[0\]: expected 0 to 1023, found 1024", [1024], rows[:1], 4, 1)
        refused(r"tokens\[0\]: expected 0 to 1023, found -1", [-1], rows[:1], 4, 1)
        refused(r"hidden: expected shape \[2, 256\]", TOKENS[:2], rows[:1], 4, 1)
        many = np.tile(rows[:1], (37, 1))
        refused("40 positions is full: 37 rows from position 4", [1] * 37, many, 4, 1)
        with pytest.raises(NativeError, match="position: expected 0 to 40, found -1"):
            head.rollback(-1)
        # Up to the last position, drafts past the end of the context included.
        draft = head.draft([1] * 36, many[:36], 4, 16)
        assert len(draft.tokens) == 16
    with pytest.raises(NativeError, match="the head is closed"):
        head.draft(TOKENS[:1], rows[:1], 0, 1)
    head.close()


@places.everywhere
def test_sequences_share_a_graph(models: Models) -> None:
    """With padded rows and equal depths, too, as on a GPU, where rounding may turn a near tie."""
    draw = np.random.default_rng(4)
    ends = [0, 240, 1]
    same = total = 0
    with (
        Head(models.gguf(), n_ctx=512, n_seq_max=3) as together,
        Head(models.gguf(), n_ctx=512, n_seq_max=3) as alone,
    ):
        for rows in ((1, 5, 2), (2, 1, 9), (4, 4, 1)):
            tasks = []
            for seq, n in enumerate(rows):
                tokens = [int(token) for token in draw.integers(900, size=n)]
                hidden = draw.standard_normal((n, together.n_embd)).astype(np.float32)
                tasks.append(SequenceTask(tokens, hidden, ends[seq], seq + 1, seq))
                ends[seq] += n
            for task, draft in zip(tasks, together.draft_batch(tasks), strict=True):
                assert task.hidden is not None
                want = alone.draft(task.tokens, task.hidden, task.first, task.depth, task.seq)
                pairs = zip(draft.tokens, want.tokens, strict=True)
                equal = next((i for i, (a, b) in enumerate(pairs) if a != b), task.depth)
                assert draft.probabilities[:equal] == pytest.approx(
                    want.probabilities[:equal], rel=0.05
                )
                same, total = same + equal, total + task.depth
        assert [together.next_position(seq) for seq in range(3)] == ends
    assert same >= 0.8 * total


def test_arguments_of_a_batch_are_checked(models: Models, hidden: np.ndarray) -> None:
    rows = rows_for(hidden, len(TOKENS))
    with Head(models.gguf(), n_ctx=40, n_seq_max=3) as head:
        head.feed(TOKENS[:4], rows[:4], 0)
        good = SequenceTask(TOKENS[:2], rows[:2], 4, 2, 0)

        def refused(text: str, *tasks: SequenceTask) -> None:
            with pytest.raises(NativeError, match=text):
                head.draft_batch(tasks)
            assert [head.next_position(seq) for seq in range(3)] == [4, 0, 0]

        refused("n: expected 1 to 3, found 0")
        refused("n: expected 1 to 3, found 4", *[good] * 4)
        refused("each sequence once, found 0 again", good, good)
        refused("seq: expected 0 to 2, found 3", good, replace(good, first=0, seq=3))
        refused("depth: expected 1 to 16, found 0", good, replace(good, first=0, depth=0, seq=1))
        refused("next position 4 of sequence 0, found 5", replace(good, first=5))
        refused("40 positions is full: 2 rows", good, replace(good, first=39, seq=1))
        refused("no hidden states are on the device", replace(good, hidden=None))
        assert len(head.draft_batch([good, replace(good, first=38, seq=2, depth=16)])) == 2
        assert [head.next_position(seq) for seq in range(3)] == [6, 0, 40]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"n_ctx": 0}, "n_ctx: expected 1 to 16777216, found 0"),
        ({"n_seq_max": 65}, "n_seq_max: expected 1 to 64, found 65"),
        ({"n_batch": 16}, "n_batch: expected 17 to 65536, found 16"),
        ({"n_threads": 0}, "n_threads: expected 1 to 1024, found 0"),
        ({"device": "CUDA7"}, "device: expected one of CPU.*, found CUDA7"),
        ({"fastmtp_size": 1024}, "fastmtp_size: expected less than the 1024 tokens .*, found 1024"),
        ({"n_ring": -2}, "n_ring: expected -1 to"),
        ({"fastmtp_size": -2}, "fastmtp_size: expected -1 to"),
    ],
)
def test_options_are_checked(models: Models, options: dict[str, Any], text: str) -> None:
    with pytest.raises(NativeError, match=text):
        Head(models.gguf(), **options)


@places.everywhere
def test_rows_go_to_another_head_and_sequence(models: Models) -> None:
    """What is drafted after them is drafted there, too; what cannot be rows is refused."""
    path = models.gguf("dense-tied")
    with Head(path) as one, Head(path, n_seq_max=2) as other:
        hidden = np.random.default_rng(3).standard_normal((len(TOKENS), one.n_embd))
        first, last = TOKENS[:-1], TOKENS[-1:]
        one.feed(first, rows_for(hidden, len(first)), 5)
        rows = one.rows()
        assert other.rows(1) == b""
        other.set_rows(rows, 5 + len(first), seq=1)
        assert other.next_position(1) == one.next_position()
        assert other.rows(1) == rows
        drafts = [
            head.draft(last, hidden[-1:], 5 + len(first), DEPTH, seq, logits=True)
            for head, seq in ((one, 0), (other, 1))
        ]
        assert np.array_equal(logits_of(drafts[0]), logits_of(drafts[1]))
        with pytest.raises(NativeError, match="n: expected 6 rows or fewer"):
            other.set_rows(rows, 6, seq=1)
        assert other.next_position(1) == 0
        with pytest.raises(NativeError, match="bytes each"):
            other.set_rows(rows[:-1], 100)
        with pytest.raises(NativeError, match="seq"):
            other.set_rows(rows, 100, seq=2)
