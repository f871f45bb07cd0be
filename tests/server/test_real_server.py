"""A real llama-server with our patches: every layout drafts, no layout changes the text.

The models are tiny and random, so few drafts are right; what is compared does not depend on it.
`--no-repack` stands for kernels that do not depend on the size of the batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader

from mtp_gguf.gguf_tools.heads.fastmtp import ID_MAP_TENSOR, IDS_KEY
from support.llama_libraries import answer, skip_where_stock_crashes, stock_libraries
from support.models import Files
from support.real_server import (
    DEPTH,
    LISTED,
    PROMPTS,
    TOKENS,
    VOCABULARY,
    Server,
    at_once,
    check_two_machines,
    drafted,
    in_layout,
    listed_ids,
    refusal,
    rpc_server,
    tokens_of,
)

pytestmark = pytest.mark.server

DRAFTING = ("--spec-draft-n-max", DEPTH)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("layout", "spec"),
    [
        ("plain", "dense-3v"),
        ("ids", "dense-3v"),
        ("table", "dense-3v"),
        ("ids", "dense-tied"),
        ("table", "dense-tied"),
        ("ids", "moe-mixed"),
        ("table", "moe-mixed"),
        ("head", "dense-3v"),
        ("sidecar", "dense-3v"),
        ("sidecar", "moe-mixed"),
    ],
)
def test_drafting_uses_the_list_and_leaves_the_text_alone(
    layout: str, spec: str, server: Server, files: Files, tmp_path: Path
) -> None:
    model = in_layout(files, layout, spec, tmp_path)
    want = tokens_of(server.answers(model, PROMPTS, options=["--no-draft"]))
    listed = listed_ids(files(layout, spec))
    assert len(listed) == (LISTED if layout in ("ids", "table", "sidecar") else 0)
    with server.running(model, options=DRAFTING, verbose=True) as client:
        results = at_once(client, PROMPTS, 1)
    assert tokens_of(results) == want
    for result in results:
        assert result["timings"]["draft_n"] >= TOKENS  # with almost no draft right
    tokens = drafted(client.log())
    assert len(tokens) >= len(PROMPTS) * TOKENS
    if listed:
        texts = {token for prompt in PROMPTS for token in prompt} | {t for w in want for t in w}
        assert set(tokens) <= (listed | texts if layout == "ids" else listed)
        assert f"drafts over {LISTED} of {VOCABULARY} tokens" in client.log()
    else:
        assert max(tokens) >= LISTED


def test_the_trunks_probabilities_are_those_of_a_file_without_a_list(
    server: Server, files: Files
) -> None:
    """To the last bit, with the head at work: its drafts are made and then thrown away."""
    found = []
    for layout in ("plain", "ids", "table"):
        passed = (files(layout), "--spec-draft-n-min", 99)
        with server.running(*passed, options=DRAFTING, verbose=True) as client:
            results = at_once(client, PROMPTS, 1, n_probs=8)
        found.append([result["completion_probabilities"] for result in results])
        assert len(drafted(client.log())) > len(PROMPTS) * TOKENS / 2
    assert found[0] == found[1] == found[2]


def test_a_checkpoint_of_another_prompt_is_not_restored(server: Server, files: Files) -> None:
    """A prompt of 5 tokens leaves a checkpoint behind its first; the next one has another first."""
    asked, alike, other = [7, 8, 6], [7, 8, 9], [11, 12, 13, 14, 15]
    slot = ("--parallel", 1, "--cache-ram", 0)
    with server.running(files("plain"), *slot) as client:
        want = client.complete(asked)["tokens"]
    with server.running(files("plain"), *slot) as client:
        client.complete(other)
        client.complete(alike)
        assert client.complete(asked)["tokens"] == want


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["ids", "table"])
def test_spread_over_two_machines_the_text_is_the_same(
    layout: str, server: Server, files: Files
) -> None:
    """Weights that are gathered at load reach devices that are not of this process, too."""
    with rpc_server(server.program) as one, rpc_server(server.program) as two:
        check_two_machines(server, files(layout), (one, two))


Break = Callable[[list[int]], None]
BROKEN: dict[str, tuple[Break, str]] = {
    "too large": (
        lambda ids: ids.__setitem__(3, VOCABULARY),
        rf"{VOCABULARY} at index 3 is not in",
    ),
    "far too large": (lambda ids: ids.__setitem__(9, 2**32 - 1), "4294967295 at index 9 is not in"),
    "negative": (lambda ids: ids.__setitem__(0, -1), "-1 at index 0 is not in"),
    "twice": (lambda ids: ids.__setitem__(200, ids[100]), "at index 200 is there twice"),
}
CASES = [(layout, fault) for layout in ("ids", "table", "sidecar") for fault in BROKEN]
CASES.remove(("ids", "negative"))  # the list has no sign


def rewrite_ids(source: Path, target: Path, edit: Break) -> Path:
    """Copy a file and change its draft vocabulary, wherever it is stored."""
    data = bytearray(source.read_bytes())
    table = next((t for t in GGUFReader(source).tensors if t.name == ID_MAP_TENSOR), None)
    width = 8 if table else 4
    key = IDS_KEY.encode()
    # key, then its value's type, the elements' type, their number
    offset = int(table.data_offset) if table else data.index(key) + len(key) + 4 + 4 + 8
    end = offset + width * LISTED
    ids = [
        int.from_bytes(data[at : at + width], "little", signed=bool(table))
        for at in range(offset, end, width)
    ]
    edit(ids)
    data[offset:end] = b"".join(i.to_bytes(width, "little", signed=bool(table)) for i in ids)
    target.write_bytes(data)
    return target


@pytest.mark.sample(4)
@pytest.mark.parametrize(("layout", "fault"), CASES)
def test_every_id_is_checked(
    layout: str, fault: str, server: Server, files: Files, tmp_path: Path
) -> None:
    edit, words = BROKEN[fault]
    path = rewrite_ids(files(layout), tmp_path / "broken.gguf", edit)
    model = ("-m", files("base"), "-md", path) if layout == "sidecar" else ("-m", path)
    said = refusal(server.program, *model, "--spec-type", "draft-mtp")
    assert re.search(words, said), said[-3000:]


def test_a_broken_list_does_not_matter_without_drafting(
    server: Server, files: Files, tmp_path: Path
) -> None:
    path = rewrite_ids(files("ids"), tmp_path / "broken.gguf", BROKEN["twice"][0])
    with server.running(path, options=["--no-draft"]) as client:
        client.complete(PROMPTS[0])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            b"nextn.shared_head_head.weight",
            b"nextn.shared_head_hexx.weight",
            "d2t: missing the head that it maps",
        ),
        (  # its name; number of dimensions, one of 8 bytes, type: I64 becomes F64, as wide
            b"\3\0\0\0\0\0\0\0d2t\1\0\0\0" + LISTED.to_bytes(8, "little") + b"\x1b",
            b"\3\0\0\0\0\0\0\0d2t\1\0\0\0" + LISTED.to_bytes(8, "little") + b"\x1c",
            "d2t: expected one dimension of type i64",
        ),
    ],
    ids=["without its head", "of another type"],
)
def test_a_map_that_does_not_fit_is_refused(
    old: bytes, new: bytes, words: str, server: Server, files: Files, tmp_path: Path
) -> None:
    path, data = tmp_path / "broken.gguf", files("table").read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    assert words in refusal(server.program, "-m", path, "--spec-type", "draft-mtp")


def test_python_runs_on_the_built_libraries(server: Server, files: Files) -> None:
    """Stock libraries cannot load this layout; these draw the same text from it as from any other.

    Without their kernels for products it is the stock libraries' text, to the token.
    """
    code = """
import json, sys, llama_cpp
from itertools import islice
llm = llama_cpp.Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False)
print(json.dumps(list(islice(llm.generate([5, 6, 7, 8], temp=0.0), 16))))
"""

    def run(layout: str, libraries: Path, **environment: str) -> Any:
        return answer(libraries, code, files(layout), **environment)

    for kernels in ("1", "0"):
        built = run("table", server.program.parent, MTP_GGUF_KERNELS=kernels)
        assert built == run("plain", server.program.parent, MTP_GGUF_KERNELS=kernels)
    skip_where_stock_crashes(files("plain"))
    assert built == run("plain", stock_libraries())
    with pytest.raises(AssertionError):
        run("table", stock_libraries())
