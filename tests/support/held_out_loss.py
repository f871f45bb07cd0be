"""The loss of a model on each token of a text, in batches of several sizes.

    cd tests; python -m support.held_out_loss MODEL OUT.npz \
        '{"windows": 40, "batches": [1, 512], …}'

The last word has the arguments of `main`.

The text: Python's own library, those modules that the demo model was not trained on. OUT.npz has,
by size of batch, the negative logarithms of the probability of each token but a window's first,
[windows, length - 1].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.native.vocabulary import Vocabulary

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int32]

DEMO = Path(__file__).parents[2] / "benchmarks" / "demo_model"


def held_out_text() -> str:
    """The modules of this Python that the demo's training leaves aside, in the order of names."""
    sys.path.insert(0, str(DEMO))
    import corpus  # noqa: PLC0415 - a program's part, no package

    return "".join(text for name, text in corpus.library_files() if corpus.is_validation(name))


class Context:
    """A llama.cpp context with default parameters but for its length; one thread."""

    def __init__(self, path: Path, length: int) -> None:
        self.model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        assert self.model
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = length
        params.n_threads = params.n_threads_batch = 1
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        assert self.context
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)
        self.batch = llama_cpp.llama_batch_init(length, 0, 1)

    def losses(self, window: Ids, size: int) -> Floats:
        """Of each token of a window but the first, decoded anew, `size` tokens at a time."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        found = []
        for at in range(0, len(window) - 1, size):
            rows = self._decode(window[at : min(at + size, len(window) - 1)], at)
            peak = rows.max(axis=1, keepdims=True)
            total = np.log(np.exp(rows - peak).sum(axis=1)) + peak[:, 0]
            said = window[at + 1 : at + 1 + len(rows)]
            found.append(total - rows[np.arange(len(rows)), said])
        return np.concatenate(found)

    def _decode(self, tokens: Ids, first: int) -> Floats:
        """Decode tokens from position `first` on; their logits."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = int(token), first + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
        assert llama_cpp.llama_decode(self.context, batch) == 0
        logits = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(logits, (len(tokens), self.n_vocab)).astype(np.float64)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)


def main(model: Path, out: Path, windows: int, length: int, batches: list[int]) -> None:
    """Write the losses of so many windows of so many tokens, in batches of each size."""
    with Vocabulary(model) as vocabulary:
        ids = np.array(vocabulary.encode(held_out_text()), np.int32)
    assert len(ids) >= windows * length
    cut = ids[: windows * length].reshape(windows, length)
    context = Context(model, length)
    found: dict[str, Any] = {
        str(size): np.stack([context.losses(window, size) for window in cut]) for size in batches
    }
    context.close()
    np.savez(out, **found)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), **json.loads(sys.argv[3]))
