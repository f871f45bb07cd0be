"""Which parameters of llama-server a session is compared by: every one is decided."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from mtp_gguf.server.patches import read_patches
from mtp_gguf.server.upstream_source import base_names, fetch_archive
from support.models import Files
from support.real_server import Server
from support.session_files import PROMPT

ROOT = Path(__file__).parents[2]
FIELDS = ROOT / "native" / "server" / "speculative_fields.h"
STRUCTS = {"speculative": "common_params_speculative", "draft": "common_params_speculative_draft"}
LATER = {("draft", "probabilistic")}  # of llama.cpp b11549


def common_h(name: str) -> str:
    """common/common.h of a base, unpatched."""
    with tarfile.open(fetch_archive(name)) as archive:
        for member in archive:
            if member.name.endswith("/common/common.h"):
                file = archive.extractfile(member)
                assert file is not None
                return file.read().decode()
    raise AssertionError("no common/common.h")


def struct_fields(text: str) -> set[str]:
    """The names of the fields of a struct's text; functions are left out."""
    text = re.sub(r"//.*", "", text)
    return set(re.findall(r"^ {4}(?=\w)[\w:<>,* ]+?[ *](\w+)\s*(?:=[^;]*)?;", text, re.MULTILINE))


def added(name: str) -> set[str]:
    """The names that our patches add to the structs."""
    hunks = (patch.data.decode() for patch in read_patches(name))
    lines = "\n".join(
        line[1:]
        for text in hunks
        for hunk in re.findall(
            r"^@@[^\n]*struct common_params_speculative.*?(?=^@@|^diff|\Z)", text, re.M | re.S
        )
        for line in hunk.splitlines()
        if line.startswith("+")
    )
    return struct_fields(lines)


@pytest.mark.thorough
@pytest.mark.parametrize("name", base_names())
def test_every_field_is_decided(name: str) -> None:
    """A field of another llama.cpp belongs into speculative_fields.h, with a reason."""
    rule = r"^ {4}(KEPT|LEFT_OUT)\((\w+), (\w+)(?:, \"(.{10,})\")?\)"
    listed = re.findall(rule, FIELDS.read_text(), re.MULTILINE)
    decided = {(of, field) for _, of, field, _ in listed}
    assert all(bool(why) == (rule == "LEFT_OUT") for rule, _, _, why in listed)
    text = common_h(name)
    found = set()
    for of, struct in STRUCTS.items():
        body = re.search(rf"^struct {struct} \{{\n(.*?)^\}};", text, re.MULTILINE | re.DOTALL)
        assert body
        fields = struct_fields(re.split(r"^    \w+ \w+\(.*\) const", body[1], flags=re.M)[0])
        assert len(fields) > 8
        found |= {(of, field) for field in fields}
    ours = added(name)
    assert {field for _, field in found | decided} >= ours
    assert found <= decided
    assert {field for of, field in decided - found - LATER} <= ours


def control_vector(path: Path, width: int) -> Path:
    """A control vector for the first layer."""
    writer = GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", "qwen35")
    writer.add_uint32("controlvector.layer_count", 2)
    writer.add_tensor("direction.1", np.full(width, 0.01, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.thorough
def test_ways_of_drafting_and_control_vectors(server: Server, files: Files, tmp_path: Path) -> None:
    folder, vector = tmp_path / "sessions", control_vector(tmp_path / "vector.gguf", 256)

    def asked(*passed: object) -> tuple[int, str]:
        options = ("--depth", 2, "--session-dir", folder)
        with server.running(files("ids"), "--parallel", 1, *passed, options=options) as client:
            timings = client.complete(PROMPT, n_predict=2)["timings"]
        return timings["cache_n"], timings.get("cache_miss", {}).get("message", "")

    assert asked()[0] == 0
    harmless = ("--spec-draft-p-min", 0.4, "--spec-draft-n-min", 1, "--spec-ngram-mod-n-match", 9)
    assert asked(*harmless)[0] > 0
    for passed, words in (
        (("--control-vector", vector), "control vector 0: expected "),
        (("--control-vector-scaled", f"{vector}:0.5"), "times 0.5 in layers"),
        (("--no-spec-draft-fused",), "draft fused: expected 0, found 1"),
    ):
        reused, why = asked(*passed)
        assert reused == 0
        assert words in why
    assert asked("--control-vector", vector)[0] > 0  # its own
