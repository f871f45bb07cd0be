"""A random walk over the recurrent memory, compared with a context that never drafts.

    cd tests; python -m support.rollback_walk MODEL SEED STEPS TOKENS [LAYERS [ENDPOINT]]

TOKENS: how many can be rolled back (`n_rs_seq`). What each step leaves is counted here, in Python;
the context that never drafts decodes the accepted tokens one at a time. Their logits must be equal
bit for bit, so the libraries need kernels that do not depend on the batch (native/kernels). Prints
the numbers of rows and of saved states that were compared, of rollbacks that were granted and
refused, and of states that were restored.

LAYERS: those on a GPU, whose kernels depend on the batch: logits may move by ROUNDING, if the model
is in F32 and the GPU computes in F32. ENDPOINT: of an RPC server on this machine, which has the
LAYERS instead; its kernels are the same.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_gguf.gguf_tools.machine.system import shared_library
from mtp_gguf.native.runtime import llama_cpp as llama
from mtp_gguf.native.runtime import loaded_library
from support.native_trunk import decode_rows

SEQUENCES = 4
UBATCH = 12  # within the 15 tokens up to which all kernels keep their bits
LONGEST = 120  # tokens of a sequence, then it starts anew
# Standard deviations of the logits of a batch. Seen on llvmpipe: 0.0001, and 0.0007 with experts; a
# log that is not replayed moves them by several.
ROUNDING = 0.002
RECURRENT = llama.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
WHOLE = 0  # with the keys and values
ON_DEVICE = RECURRENT | llama.LLAMA_STATE_SEQ_FLAGS_ON_DEVICE

Rows = list[tuple[int, int, int]]  # sequence, position, token
Logits = npt.NDArray[np.float32]


class Context:
    """A context of the model, with `tokens` that can be rolled back."""

    def __init__(self, model: Any, tokens: int) -> None:
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_rs_seq = 1024, SEQUENCES, tokens
        params.kv_unified = False  # attention adds up in the order of the cache
        params.n_batch, params.n_ubatch = 128, UBATCH
        params.n_threads = params.n_threads_batch = 1
        self.context = llama.llama_init_from_model(model, params)
        assert self.context
        self.memory = llama.llama_get_memory(self.context)
        self.n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def decode(self, rows: Rows) -> Logits:
        """Logits of all rows."""
        assert decode_rows(self.context, rows) == 0
        each = (llama.llama_get_logits_ith(self.context, i) for i in range(len(rows)))
        return np.array([np.ctypeslib.as_array(row, (self.n_vocab,)) for row in each])

    def remove(self, seq: int, first: int) -> bool:
        """Take the tokens from position `first` on out of a sequence."""
        return bool(llama.llama_memory_seq_rm(self.memory, seq, first, -1))

    def save(self, seq: int, flags: int) -> Any:
        """The state of a sequence."""
        out = (ctypes.c_uint8 * llama.llama_state_seq_get_size_ext(self.context, seq, flags))()
        size = llama.llama_state_seq_get_data_ext(self.context, out, len(out), seq, flags)
        assert size == len(out)
        return out

    def restore(self, state: Any, seq: int, flags: int) -> None:
        """Give a sequence the state that `save` returned."""
        size = llama.llama_state_seq_set_data_ext(self.context, state, len(state), seq, flags)
        assert size == len(state)

    def save_all(self) -> Any:
        """The state of all sequences."""
        out = (ctypes.c_uint8 * llama.llama_state_get_size(self.context))()
        assert llama.llama_state_get_data(self.context, out, len(out)) <= len(out)
        return out

    def restore_all(self, state: Any) -> None:
        """What `save_all` returned."""
        assert llama.llama_state_set_data(self.context, state, len(state))


def words(state: Any) -> npt.NDArray[np.uint32]:
    """What a state says: its bytes, but that an empty memory may be cleared to -0."""
    found = np.frombuffer(state, np.uint32)
    return np.where(found == 1 << 31, np.uint32(0), found)


@dataclass
class Saved:
    """A sequence of the past: which one, its length, and the state that both contexts saved."""

    seq: int
    length: int
    flags: int
    states: tuple[Any, Any]


@dataclass
class Cell:
    """What sequences that were copied share until they go on: how many tokens can go."""

    removable: int


class Walk:
    """Two contexts that must agree, and what is known of them."""

    def __init__(self, model: Any, seed: int, tokens: int, rounding: float, mixed: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.tokens = tokens
        self.rounding = rounding
        self.mixed = mixed  # some layers keep snapshots, which copies on the device lack
        self.farthest = 0.0
        self.drafting = Context(model, tokens)
        os.environ["LLAMA_RS_REPLAY"] = "0"  # llama.cpp's own graph, without ours
        self.plain = Context(model, 0)
        self.length = [0] * SEQUENCES
        self.cells = [Cell(0) for _ in range(SEQUENCES)]
        self.saved: list[Saved] = []
        self.count = {"rows": 0, "states": 0, "granted": 0, "refused": 0, "restored": 0}

    def pick(self, low: int, high: int) -> int:
        """A number, both ends included."""
        return int(self.rng.integers(low, high + 1))

    def used(self) -> list[int]:
        """Sequences that are not empty."""
        return [seq for seq in range(SEQUENCES) if self.length[seq]]

    def new_tokens(self, seq: int, n: int) -> Rows:
        """Rows that go on with a sequence."""
        ids = self.rng.integers(0, self.plain.n_vocab, n).tolist()
        return [(seq, self.length[seq] + i, token) for i, token in enumerate(ids)]

    def extend(self, seq: int, n: int) -> None:
        """Note `n` decoded tokens."""
        self.length[seq] += n
        self.cells[seq] = Cell(min(n - 1, self.tokens))

    def take_back(self, seq: int, n: int) -> bool:
        """Roll back `n` tokens where that can be done; it is refused exactly where it cannot."""
        shared = sum(cell is self.cells[seq] for cell in self.cells) > 1
        possible = n <= self.cells[seq].removable and not shared
        assert self.drafting.remove(seq, self.length[seq] - n) == possible
        self.count["granted" if possible else "refused"] += 1
        if possible:
            self.length[seq] -= n
            self.cells[seq].removable -= n
        return possible

    def verify(self) -> None:
        """Several sequences decode a token and drafts, and accept some of them."""
        seqs = self.rng.permutation(SEQUENCES)[: self.pick(1, SEQUENCES)].tolist()
        each = [self.new_tokens(seq, self.pick(1, self.tokens + 1)) for seq in seqs]
        found = self.drafting.decode([row for rows in each for row in rows])
        for seq, rows in zip(seqs, each, strict=True):
            self.extend(seq, len(rows))
            accepted = len(rows)
            while accepted > 1 and self.pick(0, 3):
                n = self.pick(1, accepted - 1)
                assert self.take_back(seq, n)
                accepted -= n
            too_many = self.cells[seq].removable + 1
            if too_many < self.length[seq] and not self.pick(0, 7):
                assert not self.take_back(seq, too_many)
            want = np.concatenate([self.plain.decode([row]) for row in rows[:accepted]])
            self.compare(found[:accepted], want)
            found = found[len(rows) :]

    def prompt(self) -> None:
        """One sequence decodes many tokens, and takes back a few."""
        seq = self.pick(0, SEQUENCES - 1)
        rows = self.new_tokens(seq, self.pick(2, 40))
        found = self.drafting.decode(rows)
        self.extend(seq, len(rows))
        n = self.pick(0, min(self.tokens, len(rows) - 1))
        if n:
            assert self.take_back(seq, n)
        kept = len(rows) - n
        self.compare(found[:kept], self.plain.decode(rows[:kept]))

    def compare(self, found: Logits, want: Logits) -> None:
        """Bit for bit, or with some rounding."""
        far = float(np.abs(found - want).max() / want.std())
        self.farthest = max(self.farthest, far)
        assert far <= self.rounding if self.rounding else found.tobytes() == want.tobytes(), far
        self.count["rows"] += len(found)

    def empty(self, seq: int) -> None:
        """Forget a sequence."""
        for context in (self.drafting, self.plain):
            assert context.remove(seq, -1)
        self.forget(seq, 0)
        self.length[seq] = 0
        self.cells[seq] = Cell(0)

    def take_back_shared(self) -> None:
        """A cell that sequences share cannot be rolled back for one of them."""
        for seq in self.used():
            if self.length[seq] > 1 and sum(cell is self.cells[seq] for cell in self.cells) > 1:
                assert not self.take_back(seq, 1)

    def copy(self) -> None:
        """A sequence becomes another's copy; they share a cell until one of them goes on."""
        source, target = self.rng.permutation(SEQUENCES)[:2].tolist()
        self.empty(target)
        for context in (self.drafting, self.plain):
            llama.llama_memory_seq_cp(context.memory, source, target, -1, -1)
        self.length[target] = self.length[source]
        self.cells[target] = self.cells[source] if self.length[source] else Cell(0)
        self.take_back_shared()

    def keep(self) -> None:
        """All sequences but one are forgotten."""
        if not self.used():
            return
        kept = int(self.rng.choice(self.used()))
        for context in (self.drafting, self.plain):
            llama.llama_memory_seq_keep(context.memory, kept)
        for seq in range(SEQUENCES):
            if seq != kept:
                self.empty(seq)  # seq_keep leaves the keys of other streams where they are

    def save(self) -> None:
        """Saving changes nothing, and a context that cannot draft reads what one that can saved."""
        if not self.used():
            return
        seq = int(self.rng.choice(self.used()))
        flags = (RECURRENT, WHOLE)[self.pick(0, 1)]
        found, want = (context.save(seq, flags) for context in (self.drafting, self.plain))
        if self.rounding:
            assert len(found) == len(want)
        else:
            assert np.array_equal(words(found), words(want)), "saved states differ"
        self.count["states"] += 1
        self.saved.append(Saved(seq, self.length[seq], flags, (found, want)))
        self.plain.restore(found, seq, flags)

    def restore(self) -> None:
        """A sequence goes on from what it was, or another takes up what it was."""
        if not self.saved:
            return
        saved = self.saved[self.pick(0, len(self.saved) - 1)]
        seq = saved.seq if saved.flags == RECURRENT else self.pick(0, SEQUENCES - 1)
        for context, state in zip((self.drafting, self.plain), saved.states, strict=True):
            context.restore(state, seq, saved.flags)
            assert context.remove(seq, saved.length)
        self.forget(seq, saved.length if seq == saved.seq else 0)
        self.length[seq] = saved.length
        self.cells[seq] = Cell(0)
        self.count["restored"] += 1

    def forget(self, seq: int, length: int) -> None:
        """Drop what was saved of a sequence that lost its tokens from `length` on."""
        self.saved = [entry for entry in self.saved if entry.seq != seq or entry.length <= length]

    def checkpoint(self) -> None:
        """A copy on the device; restoring it rolls back the tokens decoded after it."""
        for seq in self.used()[:1]:
            if sum(cell is self.cells[seq] for cell in self.cells) > 1:
                return
            state = self.drafting.save(seq, ON_DEVICE)
            removable = self.cells[seq].removable
            self.drafting.decode(self.new_tokens(seq, self.pick(1, 9)))
            self.drafting.restore(state, seq, ON_DEVICE)
            assert self.drafting.remove(seq, self.length[seq])
            self.cells[seq] = Cell(0 if self.mixed else removable)

    def whole(self) -> None:
        """All sequences are saved and restored at once."""
        self.drafting.restore_all(self.drafting.save_all())
        for cell in self.cells:
            cell.removable = 0

    def step(self) -> None:
        """One of all that can happen."""
        for seq in range(SEQUENCES):
            if self.length[seq] > LONGEST:
                self.empty(seq)
        others: list[tuple[Callable[[], None], int]] = [
            (self.prompt, 6), (self.copy, 8), (self.save, 8), (self.restore, 5),
            (self.checkpoint, 6), (self.whole, 2), (self.keep, 1),
            (lambda: self.empty(self.pick(0, SEQUENCES - 1)), 2),
        ]  # fmt: skip
        at = self.pick(0, 99)
        for action, share in others:
            at -= share
            if at < 0:
                return action()
        return self.verify()


def add_rpc_server(endpoint: str) -> None:
    """Make a device of the RPC server."""
    folder = loaded_library("llama").parent
    ggml, rpc = (ctypes.CDLL(str(folder / shared_library(n))) for n in ("ggml", "ggml-rpc"))
    rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    ggml.ggml_backend_register.argtypes = [ctypes.c_void_p]
    ggml.ggml_backend_register(rpc.ggml_backend_rpc_add_server(endpoint.encode()))


def load(path: str, layers: int) -> Any:
    """A model with layers on a GPU; on a CPU the kernels do not depend on the batch."""
    params = llama.llama_model_default_params()
    params.use_extra_bufts = False
    params.n_gpu_layers = layers
    model = llama.llama_model_load_from_file(path.encode(), params)
    assert model
    return model


def main() -> None:
    path, seed, steps, tokens = sys.argv[1], *map(int, sys.argv[2:5])
    layers = int(sys.argv[5]) if len(sys.argv) > 5 else 0
    rpc = sys.argv[6] if len(sys.argv) > 6 else ""
    if rpc:
        add_rpc_server(rpc)
    model = load(path, layers)
    mixed = bool(rpc) or os.environ.get("LLAMA_RS_REPLAY") == "cpu"
    walk = Walk(model, seed, tokens, ROUNDING if layers and not rpc else 0.0, mixed)
    for i in range(steps):
        try:
            walk.step()
        except AssertionError as error:
            raise AssertionError(f"step {i} of seed {seed}") from error
    print(f"logits move up to {walk.farthest:.2g}")
    print(json.dumps(walk.count))


if __name__ == "__main__":
    main()
