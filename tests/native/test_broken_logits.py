"""NaN or infinite logits end a text with an error that names them; the process survives."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mtp_gguf.gguf_tools.files.format import open_gguf
from mtp_gguf.gguf_tools.files.tensor_types import F32
from mtp_gguf.native.errors import NativeError
from mtp_gguf.native.session import Session
from support import places
from support.broken_logits import CHAINS, PROMPT, TOKENS
from support.checkpoints import SPECS
from support.gguf_files import Rewrite
from support.llama_libraries import FAST, STOCK, run_on
from support.models import Dial, Models
from support.native_trunk import Trunk

if TYPE_CHECKING:
    from pathlib import Path

DEPTHS = (0, 3, "auto")
HUGE = 3e38
WHICH = 7  # the token whose logit is changed
GOOD = 4  # tokens of a text before its context becomes wrong


def table(path: Path, name: str) -> np.ndarray:
    """A matrix of a model in F32, [rows, width]."""
    with open_gguf(path) as file:
        stored = next(t for t in file.tensors if t.name == name)
        assert stored.type is F32
        values = np.frombuffer(bytes(file.source.read(stored.offset, stored.nbytes)), np.float32)
        return values.reshape(stored.shape[::-1]).copy()


def tensor(values: np.ndarray) -> tuple[tuple[int, ...], Any, bytes]:
    return tuple(values.shape[::-1]), F32, values.astype(np.float32).tobytes()


@pytest.fixture
def models_by_fault(dial: Dial, rewrite: Rewrite) -> dict[str, str]:
    """Models whose text is a known cycle, and what is wrong with their logits.

    Embeddings have a large number in dimension 0, so that the hidden state has one there, too.
    """
    path = dial("tiny", quant="F32", head="F32")
    embedding, output = table(path, "token_embd.weight"), table(path, "output.weight")
    norm = table(path, "output_norm.weight")
    embedding[:, 0] = 20

    def model(**changed: np.ndarray) -> str:
        tensors = {"token_embd.weight": embedding, **changed}
        named = {name.replace("__", "."): tensor(values) for name, values in tensors.items()}
        return str(rewrite(path, tensors=named))

    def with_logit(rows: Any, value: float) -> np.ndarray:
        changed = output.copy()
        changed[rows, 0] = value
        return changed

    text = [PROMPT[-1]]
    for _ in range(GOOD):
        text.append(dial.successors("tiny")[text[-1]])
    late = embedding.copy()
    late[text[-1]] = np.nan
    return {
        "nan everywhere": model(output_norm__weight=np.full_like(norm, np.nan)),
        "one nan": model(output__weight=with_logit(WHICH, np.nan)),
        "one inf": model(output__weight=with_logit(WHICH, HUGE)),
        "-inf everywhere": model(output__weight=with_logit(slice(None), -HUGE)),
        "one -inf": model(output__weight=with_logit(WHICH, -HUGE)),
        "later": model(token_embd__weight=late),
    }


EXPECTED = "the trunk's logits: expected numbers to choose a token by, found "
FOUND = {
    "nan everywhere": "nan for token 0",
    "one nan": f"nan for token {WHICH}",
    "one inf": f"inf for token {WHICH}",
    "-inf everywhere": "-inf for all of them",
    "later": "nan for token 0",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("libraries", [STOCK, FAST])
def test_a_text_ends_with_an_error(
    libraries: str, models_by_fault: dict[str, str], dial: Dial
) -> None:
    said = run_on(libraries, "broken_logits", json.dumps(models_by_fault), *DEPTHS, timeout=120)
    ended = json.loads(said)
    assert ended.keys() == models_by_fault.keys()
    for fault, by_way in ended.items():
        assert len(by_way) == len(DEPTHS) * len(CHAINS)
        for way, (tokens, error) in by_way.items():
            if fault == "one -inf":  # what masks do: the token never comes
                assert (len(tokens), error) == (TOKENS, ""), way
                assert WHICH not in tokens
                continue
            assert error.startswith(EXPECTED + FOUND[fault]), (fault, way, error)
            assert len(tokens) == (GOOD if fault == "later" else 0), (fault, way, tokens)


@pytest.mark.parametrize("libraries", [STOCK, FAST])
def test_products_with_quantized_weights_do_not_hide_a_nan(
    libraries: str, models: Models, rewrite: Rewrite
) -> None:
    """They round their input, so that the logits of such a hidden state are numbers."""
    path = models.gguf("demo", "Q4_K_M")
    norm = table(path, "output_norm.weight").reshape(-1)
    one = norm.copy()
    one[WHICH] = np.nan
    broken = {
        name: str(rewrite(path, tensors={"output_norm.weight": tensor(values)}))
        for name, values in (("all", np.full_like(norm, np.nan)), ("one", one))
    }
    ended = json.loads(run_on(libraries, "broken_logits", json.dumps(broken), 0, 3, timeout=120))
    for way, (tokens, error) in ended["all"].items():
        assert not tokens, way
        assert error.startswith(f"{EXPECTED}0 for all of them;"), (way, error)
    found = f"expected finite numbers, found nan in dimension {WHICH}"
    for way, (tokens, error) in ended["one"].items():
        if way.startswith("3 "):  # only a session that drafts reads the hidden state
            assert not tokens, way
            assert error.startswith("the trunk's hidden state, from which "), (way, error)
            assert found in error


@places.everywhere
@pytest.mark.parametrize("token", [959, 960, 990])
def test_every_token_of_an_odd_vocabulary_is_checked(
    token: int, models: Models, rewrite: Rewrite
) -> None:
    """991 is no multiple of what is compared at a time."""
    path = models.gguf(replace(SPECS["dense-tied"], name="odd", vocab_size=991))
    rows = table(path, "token_embd.weight")  # the output as well
    rows[token] = np.nan
    broken = rewrite(path, tensors={"token_embd.weight": tensor(rows)})
    with closing(Trunk(broken, 0)) as trunk, Session(trunk.context, None, max_depth=0) as session:
        session.decode([1])
        with pytest.raises(NativeError, match=f"nan for token {token}"):
            session.argmax()
