"""A real llama-server with our patches: every layout drafts, no layout changes the text.

The models are tiny and random, so few drafts are right; what is compared does not depend on it.
`--no-repack` stands for kernels that do not depend on the size of the batch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGUFReader

from mtp_gguf.gguf_tools.heads.fastmtp import ID_MAP_TENSOR, IDS_KEY
from support.llama_libraries import skip_where_stock_crashes
from support.models import Files
from support.real_server import (
    DEPTH,
    LEAST_ACCEPTED,
    LISTED,
    PROMPTS,
    TEXTS,
    TOKENS,
    VOCABULARY,
    answers,
    beside,
    certain,
    check_beginnings,
    check_two_machines,
    drafted,
    drafts_of,
    listed_ids,
    refusal,
    rpc_server,
    running,
    tokens_of,
)

pytestmark = pytest.mark.server


# ------------------------------------------------------------ text


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
    layout: str, spec: str, patched_server: Path, files: Files, tmp_path: Path, free_port: int
) -> None:
    alone = layout in ("head", "sidecar")
    model = files("base" if alone else layout, spec)
    asked = (patched_server, model, free_port, PROMPTS)
    want = tokens_of(answers(*asked, options=["--no-draft"]))
    listed = listed_ids(files(layout, spec))
    assert len(listed) == (LISTED if layout in ("ids", "table", "sidecar") else 0)
    if alone:
        model = beside(model, files(layout, spec), tmp_path)
    log = tmp_path / "log"
    verbose = ("--log-file", log, "--verbosity", 10)
    depth = ("--spec-draft-n-max", DEPTH)
    results = answers(patched_server, model, free_port, PROMPTS, *verbose, options=depth)
    assert tokens_of(results) == want
    for result in results:
        assert result["timings"]["draft_n"] >= TOKENS  # with almost no draft right
    tokens = drafted(log)
    assert len(tokens) >= len(PROMPTS) * TOKENS
    if listed:
        texts = {token for prompt in PROMPTS for token in prompt} | {t for w in want for t in w}
        assert set(tokens) <= (listed | texts if layout == "ids" else listed)
        assert f"drafts over {LISTED} of {VOCABULARY} tokens" in log.read_text(errors="replace")
    else:
        assert max(tokens) >= LISTED


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["plain", "ids", "table", "sidecar"])
def test_a_trained_head_is_often_right(
    layout: str, patched_server: Path, files: Files, tmp_path: Path, free_port: int
) -> None:
    """Accepted drafts, too, give the text of a server that does not draft."""
    alone = layout == "sidecar"
    model = files("base" if alone else layout, "demo")
    want = tokens_of(answers(patched_server, model, free_port, TEXTS, options=["--no-draft"]))
    if alone:
        model = beside(model, files(layout, "demo"), tmp_path)
    depth = ("--spec-draft-n-max", DEPTH)
    results = answers(patched_server, model, free_port, TEXTS, options=depth)
    assert tokens_of(results) == want
    offered, accepted = drafts_of(results)
    assert accepted > LEAST_ACCEPTED * offered


def test_the_trunks_probabilities_are_those_of_a_file_without_a_list(
    patched_server: Path, files: Files, tmp_path: Path, free_port: int
) -> None:
    """To the last bit, with the head at work: its drafts are made and then thrown away."""
    found, depth = [], ("--spec-draft-n-max", DEPTH)
    for layout in ("plain", "ids", "table"):
        log = tmp_path / layout
        passed = ("--spec-draft-n-min", 99, "--log-file", log, "--verbosity", 10)
        asked = (patched_server, files(layout), free_port, PROMPTS)
        results = answers(*asked, *passed, options=depth, n_probs=8)
        found.append([result["completion_probabilities"] for result in results])
        assert len(drafted(log)) > len(PROMPTS) * TOKENS / 2
    assert found[0] == found[1] == found[2]


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["ids", "table"])
def test_four_slots_at_once_with_prompts_used_again(
    layout: str, patched_server: Path, files: Files, free_port: int
) -> None:
    asked = (patched_server, files(layout, "demo"), free_port)
    plain = answers(*asked, TEXTS, options=["--no-draft"], n_probs=2)
    want = [certain(result) for result in plain]
    assert sum(map(len, want)) > len(TEXTS) * TOKENS / 2  # there is something to compare
    depth = ("--spec-draft-n-max", DEPTH)
    check_beginnings(want * 3, answers(*asked, TEXTS * 3, options=depth, slots=4))


def test_a_checkpoint_of_another_prompt_is_not_restored(
    patched_server: Path, files: Files, free_port: int
) -> None:
    """A prompt of 5 tokens leaves a checkpoint behind its first; the next one has another first."""
    asked, alike, other = [7, 8, 6], [7, 8, 9], [11, 12, 13, 14, 15]
    slot = ("--parallel", 1, "--cache-ram", 0)
    with running(patched_server, files("plain"), free_port, *slot) as client:
        want = client.complete(asked)["tokens"]
    with running(patched_server, files("plain"), free_port, *slot) as client:
        client.complete(other)
        client.complete(alike)
        assert client.complete(asked)["tokens"] == want


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["ids", "table"])
def test_spread_over_two_machines_the_text_is_the_same(
    layout: str, patched_server: Path, files: Files, tmp_path: Path, free_ports: list[int]
) -> None:
    """Weights that are gathered at load reach devices that are not of this process, too."""
    build = patched_server.parent
    with rpc_server(build, free_ports[0]) as one, rpc_server(build, free_ports[1]) as two:
        check_two_machines(patched_server, files(layout), free_ports[2], tmp_path, (one, two))


# ------------------------------------------------------------ files that must be refused

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
    layout: str, fault: str, patched_server: Path, files: Files, tmp_path: Path
) -> None:
    edit, words = BROKEN[fault]
    path = rewrite_ids(files(layout), tmp_path / "broken.gguf", edit)
    model = ("-m", files("base"), "-md", path) if layout == "sidecar" else ("-m", path)
    said = refusal(patched_server, *model, "--spec-type", "draft-mtp")
    assert re.search(words, said), said[-3000:]


def test_a_broken_list_does_not_matter_without_drafting(
    patched_server: Path, files: Files, tmp_path: Path, free_port: int
) -> None:
    path = rewrite_ids(files("ids"), tmp_path / "broken.gguf", BROKEN["twice"][0])
    with running(patched_server, path, free_port, options=["--no-draft"]) as client:
        client.complete(PROMPTS[0])


def test_a_map_without_its_head_is_refused(
    patched_server: Path, files: Files, tmp_path: Path
) -> None:
    path = tmp_path / "headless.gguf"
    data = files("table").read_bytes()
    name, other = b"nextn.shared_head_head.weight", b"nextn.shared_head_hexx.weight"
    assert data.count(name) == 1
    path.write_bytes(data.replace(name, other))
    said = refusal(patched_server, "-m", path, "--spec-type", "draft-mtp")
    assert "d2t: missing the head that it maps" in said


def test_a_map_of_another_type_is_refused(
    patched_server: Path, files: Files, tmp_path: Path
) -> None:
    path = tmp_path / "f64.gguf"
    data = bytearray(files("table").read_bytes())
    entry = (
        data.index(b"\3\0\0\0\0\0\0\0d2t") + 8 + 3
    )  # its name; number of dimensions, one of 8 bytes, type
    assert int.from_bytes(data[entry + 12 : entry + 16], "little") == 27  # I64
    data[entry + 12] = 28  # F64, as wide
    path.write_bytes(data)
    said = refusal(patched_server, "-m", path, "--spec-type", "draft-mtp")
    assert "d2t: expected one dimension of type i64" in said


def test_python_runs_on_the_built_libraries(patched_server: Path, files: Files) -> None:
    """Stock libraries cannot load this layout; these draw the same text from it as from any other.

    Without their kernels for products it is the stock libraries' text, to the token.
    """
    code = """
import sys, llama_cpp
llm = llama_cpp.Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False)
tokens = []
for token in llm.generate([5, 6, 7, 8], temp=0.0):
    tokens.append(token)
    if len(tokens) == 16:
        break
print(tokens)
"""

    def run(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, path],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )

    libraries = {"LLAMA_CPP_LIB_PATH": str(patched_server.parent)}
    for kernels in ("1", "0"):
        libraries["MTP_GGUF_KERNELS"] = kernels
        built, plain = run(files("table"), **libraries), run(files("plain"), **libraries)
        assert built.returncode == 0, built.stderr
        assert built.stdout == plain.stdout != ""
    skip_where_stock_crashes(files("plain"))
    stock = run(files("plain"))
    assert stock.returncode == 0, stock.stderr
    assert built.stdout == stock.stdout
    assert run(files("table")).returncode != 0
