"""`graft` reports the acceptance rate of the head, and the cause if it is low."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.convert.heads import acceptance as graft_end
from mtp_gguf.convert.heads import head_gate
from mtp_gguf.gguf_tools.heads.acceptance import LEAST
from mtp_gguf.gguf_tools.machine import process_memory
from mtp_gguf.gguf_tools.machine.text import human_bytes
from mtp_gguf.native.checks import acceptance as measuring
from mtp_gguf.native.checks.acceptance import measure_acceptance, memory_needed
from mtp_gguf.native.errors import HeadMissingError
from mtp_gguf.native.runtime import VARIABLE
from support.commands import invoke, succeed
from support.gguf_files import edited, permute_projection
from support.models import DEMO

# 59 of 140 when this was written, a few more or less where kernels round differently.
GOOD, BAD = LEAST, 0.2


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(graft_end.VARIABLE, "1")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the demo as `whole.gguf`, its trunk, and the checkpoint `hf`."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "hf").symlink_to(DEMO)
    succeed("convert", folder / "hf", "-o", folder / "whole.gguf", "--mtp-f16", "--no-check")
    succeed("strip", folder / "whole.gguf", "-o", folder / "trunk.gguf")
    return folder


def graft(demo: Path, donor: Path, target: Path, *options: object) -> dict[str, Any]:
    """Graft with --json; the fields."""
    arguments = (demo / "trunk.gguf", "--from", donor, "-o", target, "--json", *options)
    result = invoke("graft", *arguments)
    assert result.exit_code == 0, result.output
    fields: dict[str, Any] = json.loads(result.stdout)
    assert fields["path"] == str(target)
    assert fields["bytes"] == target.stat().st_size
    assert fields["head"]["ready"] is True
    return fields


def test_the_models_own_head(demo: Path, tmp_path: Path) -> None:
    found = graft(demo, demo / "hf", tmp_path / "made.gguf", "--mtp-f16", "--fastmtp")["acceptance"]
    assert found["share"] == found["accepted"] / found["drafted"] > GOOD
    assert found["greedy"]["accepted"][0] == found["accepted"]
    assert found["seconds"] > 0
    assert (found["poor"], found["skipped"], found["share_without_list"]) == (False, None, None)
    report = succeed(
        "graft", demo / "trunk.gguf", "--from", demo / "hf", "-o", tmp_path / "again.gguf"
    )
    assert "acceptance: greedy " in report
    assert "warning" not in report


@pytest.mark.thorough
def test_a_head_that_learned_something_else(demo: Path, tmp_path: Path) -> None:
    donor = edited(demo / "whole.gguf", tmp_path / "donor.gguf", tensors=permute_projection)
    arguments = (demo / "trunk.gguf", "--from", donor, "-o", tmp_path / "made.gguf")
    report = succeed("graft", *arguments)
    assert "of first drafts are accepted" in report
    assert "another model, fine-tune or layer" in report
    assert f"fix: mtp-gguf graft {demo / 'trunk.gguf'} --from ORIGINAL" in report
    assert f"mtp-gguf train-head {tmp_path / 'made.gguf'} --text FILES" in report
    found = graft(demo, donor, tmp_path / "again.gguf")["acceptance"]
    assert found["poor"] is True
    assert found["share"] < BAD
    # The draft vocabulary is not reported as the cause if the head is poor without it.
    found = graft(demo, donor, tmp_path / "listed.gguf", "--fastmtp")["acceptance"]
    assert found["share_without_list"] < BAD


@pytest.mark.thorough
def test_a_list_without_the_words(demo: Path, tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(list(range(3900, 4000))))
    options = ("--fastmtp-ids", tmp_path / "ids.json", "--fastmtp", 64)
    found = graft(demo, demo / "whole.gguf", tmp_path / "made.gguf", *options)["acceptance"]
    assert found["poor"] is True
    assert found["share"] < BAD
    assert found["share_without_list"] > GOOD
    arguments = (demo / "trunk.gguf", "--from", demo / "whole.gguf", *options)
    odd = tmp_path / 'it\'s $(odd) "1".gguf'
    report = succeed("graft", *arguments, "-o", odd)
    assert "; without the draft vocabulary it would be" in report
    [command] = [line.strip() for line in report.splitlines() if line.startswith("  fix: ")]
    words = shlex.split(command.removeprefix("fix: "))
    assert words[:3] == ["mtp-gguf", "fastmtp", "add"]
    assert words[3:] == [str(odd), "--corpus", "FILES", "--in-place"]
    # The command fixes it.
    text = "".join(passage.text for passage in measuring.corpus())
    (tmp_path / "words.txt").write_text(text * 3)
    words[words.index("FILES")] = str(tmp_path / "words.txt")
    succeed(*words[1:])
    assert measure_acceptance(odd).share > GOOD


def test_no_check_loads_nothing(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_gguf.convert.heads.graft.record_acceptance", None)
    assert graft(demo, demo / "hf", tmp_path / "made.gguf", "--no-check")["acceptance"] is None


def test_the_cost_is_named_first_and_what_does_not_fit_is_skipped(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "made.gguf"
    monkeypatch.setattr(graft_end, "_LARGE", 1000)
    result = invoke("graft", demo / "trunk.gguf", "--from", demo / "hf", "-o", target)
    assert "measuring acceptance: takes 27" in result.stderr
    assert "--no-check skips it" in result.stderr
    assert "acceptance: greedy " in result.stdout

    monkeypatch.setattr(process_memory, "free_memory", lambda: 200 << 20)
    arguments = ("--from", demo / "hf", "-o", target, "--overwrite")
    result = invoke("graft", demo / "trunk.gguf", *arguments)
    assert result.exit_code == 0
    needed = human_bytes(memory_needed(target))
    words = f"not measured: the model takes {needed} of memory, and 210 MB are free\n"
    assert words in result.stdout


def test_ctrl_c_skips_the_measurement(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupt)
    found = graft(demo, demo / "whole.gguf", tmp_path / "made.gguf")["acceptance"]
    assert found["skipped"] == "interrupted"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise ImportError('llama_cpp is not installed')", "llama_cpp is not installed"),
        ("import os\nos.abort()", "llama.cpp crashed (signal 6)"),
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("import time\ntime.sleep(60)", "took longer than"),
    ],
    ids=["missing", "abort", "bug", "hangs"],
)
def test_a_failing_llama_cpp_does_not_stop_the_graft(
    code: str, words: str, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A different llama_cpp is found before the installed one in the measuring process."""
    (tmp_path / "llama_cpp.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if "sleep" in code:
        monkeypatch.setattr(measuring, "_STARTING", 1.0)
        for part in (head_gate, graft_end):
            monkeypatch.setattr(part, "_SECONDS", 0.0)
    found = graft(demo, demo / "whole.gguf", tmp_path / "made.gguf")["acceptance"]
    assert words in found["skipped"]


def test_nothing_in_the_current_folder_is_executed(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of a downloaded model may contain modules of any name."""
    for name in ("llama_cpp", "json", "mtp_gguf"):
        (tmp_path / f"{name}.py").write_text("import os\nos.abort()")
    monkeypatch.chdir(tmp_path)
    found = graft(demo, demo / "whole.gguf", Path("made.gguf"))["acceptance"]
    assert "skipped" not in found or not found["skipped"]


def test_time_is_bounded(demo: Path) -> None:
    found = measure_acceptance(demo / "whole.gguf", seconds=0.0)
    assert found.greedy.drafted[0] + found.sampled.drafted[0] == 16


def test_reasons_not_to_measure(
    demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HeadMissingError, match="no MTP head"):
        measure_acceptance(demo / "trunk.gguf")
    table = ("--fastmtp", "512", "--fastmtp-layout", "table")
    succeed("convert", demo / "hf", "-o", tmp_path / "table.gguf", *table)
    monkeypatch.setenv(VARIABLE, "stock")  # the fast libraries load this layout
    found = graft(demo, tmp_path / "table.gguf", tmp_path / "made.gguf")["acceptance"]
    assert found["share"] is None
    assert "Failed to load model" in found["skipped"]
    monkeypatch.setenv("MTP_GGUF_DISABLE", "1")
    found = graft(demo, demo / "hf", tmp_path / "off.gguf")["acceptance"]
    assert found["skipped"] == "drafting is switched off by MTP_GGUF_DISABLE"


def test_doctor_finds_a_stale_head_when_it_may_load(demo: Path, tmp_path: Path) -> None:
    stale = edited(demo / "whole.gguf", tmp_path / "stale.gguf", tensors=permute_projection)
    found = json.loads(succeed("doctor", stale, "--load", "--json"))
    [finding] = [f for f in found["findings"] if f["code"] == "stale-head"]
    assert finding["severity"] == "warning"
    assert finding["fix"] == f"mtp-gguf train-head {stale} --text FILES"
    assert found["can_draft"] is True
    found = json.loads(succeed("doctor", demo / "whole.gguf", "--load", "--json"))
    assert "stale-head" not in {f["code"] for f in found["findings"]}
