"""Head-only files as publishers ship them: FastMTP's with a short output, ggml-org's, Unsloth's.

They are made here with upstream's `gguf` package from a head with its whole output, so that nothing
of our converter's own sidecars is taken for granted.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFValueType, GGUFWriter

from mtp_gguf.gguf_tools.heads.head import HeadReport
from mtp_gguf.server.model import open_model
from support.commands import succeed
from support.models import Files
from support.real_server import (
    DEPTH,
    LEAST_ACCEPTED,
    STEPS,
    TEXTS,
    TOKENS,
    Server,
    at_once,
    counts,
    drafted,
    drafts_of,
    listed_ids,
    tokens_of,
)
from support.sidecars import write_sidecar as write_published

pytestmark = pytest.mark.server

IDS = np.array([*range(1536), *range(4087, 4096)], np.int64)[::-1]  # unsorted; the special ones too
DRAFTING = ("--spec-draft-n-max", DEPTH)
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"


def write_sidecar(head: Path, path: Path, ids: np.ndarray) -> Path:
    """The head alone of `head`, its output for the tokens `ids` only."""
    reader = GGUFReader(head)
    architecture = reader.get_field("general.architecture")
    assert architecture is not None
    writer = GGUFWriter(path, str(architecture.contents()))
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture", "mtp_gguf.")):
            kind, *inner = field.types[:2]
            sub = inner[0] if kind is GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        if tensor.name == EMBEDDING:  # tied: its rows are the output's
            writer.add_tensor(OUTPUT, tensor.data[IDS], raw_dtype=tensor.tensor_type)
    writer.add_tensor("d2t", ids)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def sidecar(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Beside nothing: a folder of its own."""
    return write_sidecar(
        files("head", "demo"), tmp_path_factory.mktemp("published") / "mtp-demo.gguf", IDS
    )


def test_alone_it_is_a_head_that_drafts(sidecar: Path) -> None:
    report: HeadReport = open_model(sidecar).head
    assert report.ready, report.reason
    assert report.draft is not None
    assert report.draft.layout.value == "sidecar"
    assert not report.stock


def test_a_sidecar_next_to_a_base_drafts_from_its_vocabulary(
    sidecar: Path, server: Server, files: Files, tmp_path: Path
) -> None:
    base = Path(shutil.copy(files("base", "demo"), tmp_path / "model.gguf"))
    shutil.copy(sidecar, tmp_path)
    assert any(tensor.tensor_type.name == "Q4_K" for tensor in GGUFReader(base).tensors)
    want = tokens_of(server.answers(base, TEXTS, options=["--no-draft"]))
    with server.running(base, options=DRAFTING, verbose=True) as client:
        results = at_once(client, TEXTS, 1)
    assert tokens_of(results) == want
    offered, accepted = drafts_of(results)
    assert offered >= len(TEXTS) * TOKENS / (DEPTH + 1)
    assert accepted > LEAST_ACCEPTED * offered  # a map that is not heeded is hardly ever right
    assert listed_ids(sidecar) == set(IDS.tolist())
    assert set(drafted(client.log())) <= set(IDS.tolist())
    assert f"drafts over {len(IDS)} of 4096 tokens" in client.log()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mtp-model-Q8_0.gguf", "MTP/mtp-model-shared-Q8_0.gguf"])
def test_a_publishers_head_drafts_as_the_models_own(
    name: str, server: Server, files: Files, tmp_path: Path
) -> None:
    """Found by its name; ggml-org's also drafts in llama.cpp's own steps, with a context."""
    shared = "shared" in name
    base, whole = tmp_path / "model.gguf", files("plain", "demo")
    succeed("strip", whole, "-o", base)  # the trunk of the same mix
    (tmp_path / name).parent.mkdir(exist_ok=True)
    write_published(whole, tmp_path / name, shared=shared)

    def ask(model: Path, *passed: object) -> list[dict[str, Any]]:
        return server.answers(model, TEXTS, *passed, options=DRAFTING)

    wanted, found = ask(whole), ask(base)
    assert drafts_of(wanted)[1] > 0
    assert tokens_of(found) == tokens_of(wanted)
    assert [*map(counts, found)] == [*map(counts, wanted)]
    if not shared:
        assert tokens_of(ask(base, STEPS)) == tokens_of(wanted)
