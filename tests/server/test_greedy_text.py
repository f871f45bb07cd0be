"""A patched llama-server writes the same greedy text however deep it drafts."""

from __future__ import annotations

import pytest

from support.models import Files
from support.real_server import TEXTS, Server, drafts_of, tokens_of

pytestmark = pytest.mark.server

AS_SHIPPED = ("--repack", "--ctx-size", 4096)  # takes back what the other tests ask for
# Two short texts; the others share no beginning, and cross the steps of 256 and 512 in which a
# cache is read.
PROMPTS = [*TEXTS[:2], "".join(TEXTS) * 5, "".join(TEXTS[::-1]) * 10]
TOKENS = 80
DEPTHS = (1, 2, 3, 4, "auto")


@pytest.mark.thorough
def test_the_text_is_the_same_at_every_depth(server: Server, files: Files) -> None:
    asked = (files("ids", "demo"), PROMPTS, *AS_SHIPPED)
    results = server.answers(*asked, options=["--no-draft"], n_predict=TOKENS)
    want = tokens_of(results)
    lengths = [result["timings"]["prompt_n"] for result in results]
    assert any(length < 256 < length + TOKENS for length in lengths), lengths
    assert any(length < 512 < length + TOKENS for length in lengths), lengths
    for depth in DEPTHS:
        options = ("--spec-draft-n-max", depth)
        results = server.answers(*asked, options=options, n_predict=TOKENS)
        assert tokens_of(results) == want, depth
        if depth != "auto":
            assert drafts_of(results)[1] > TOKENS / 2
