"""The llama-server command for a model, or one sentence if there is none."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import Result

from mtp_gguf.gguf_tools.heads.head import HeadReport
from mtp_gguf.gguf_tools.machine.system import this_machine
from mtp_gguf.gguf_tools.profile import (
    AUTO,
    DraftSettings,
    Profile,
    identify,
    profile_path,
    write_profile,
)
from mtp_gguf.native import MTPLlama
from mtp_gguf.server import command
from mtp_gguf.server.command import without_key
from mtp_gguf.server.find import ask
from mtp_gguf.server.model import ModelFile, ServedModel
from support.commands import check_refusal, invoke
from support.llama_libraries import has_kernels
from support.models import DEMO, Files
from support.sidecars import write_sidecar
from support.stand_in_server import OLDER_HELP, PATCHED_HELP, STOCK_HELP, write_stand_in
from support.tiny_llama import write_tiny_llama

Copied = Callable[[str], Path]
Limit = Callable[[int | None], None]


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    return write_stand_in(tmp_path / "stock", STOCK_HELP)


@pytest.fixture
def patched(tmp_path: Path) -> Path:
    return write_stand_in(tmp_path / "patched", PATCHED_HELP)


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Sets the threads that a limited process computes with; the tests run without a limit."""

    def to(threads: int | None) -> None:
        monkeypatch.setattr(command, "are_limited", lambda: threads is not None)
        monkeypatch.setattr(command, "computing_threads", lambda: threads)

    to(None)
    return to


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A server with patches of ours, but without the latest ones."""
    return write_stand_in(tmp_path / "older", OLDER_HELP)


@pytest.fixture
def copied(files: Files, tmp_path: Path) -> Copied:
    """Copies the file of a layout to a folder that has nothing else but servers."""
    return lambda layout: Path(shutil.copy(files(layout), tmp_path / "model.gguf"))


def serve(server: Path, model: Path, *options: object) -> Result:
    """Have `serve` print a command."""
    return invoke("serve", model, "--llama-server", server, "--print-command", *options)


def printed(server: Path, model: Path, *options: object) -> list[str]:
    """The words after the server's own name of the command that `serve` prints."""
    result = serve(server, model, *options)
    assert result.exit_code == 0, result.output
    words = shlex.split(result.stdout)
    assert words[0] == str(server)
    return words[1:]


def refusal(server: Path, model: Path, *options: object, code: int = 1) -> str:
    """The sentence that `serve` ends with."""
    result = serve(server, model, *options)
    assert result.stdout == ""
    return check_refusal(result.exit_code, result.stderr, code=code)


def tune(model: Path, settings: DraftSettings, server: Path) -> None:
    """Leave a profile beside `model`, as if `tune` had measured it with `server`'s libraries."""
    machine = this_machine(ask(server).kernels)
    profile = Profile(identify(model), machine, settings, "2026-01-01", "0", 1.0, 2.0)
    write_profile(profile_path(model), profile)


@pytest.mark.parametrize("name", ["plain", "ids", "table"])
def test_a_patched_server_drafts_with_every_whole_model(
    name: str, patched: Path, files: Files
) -> None:
    model = files(name)
    assert printed(patched, model) == (
        f"-m {model} --host 127.0.0.1 --port 8080 --spec-type draft-mtp --spec-draft-n-max auto"
    ).split(" ")


def test_options_of_several_gpus_are_passed_on(patched: Path, files: Files) -> None:
    words = printed(patched, files("plain"), "-sm", "row", "-ts", "3,1", "-mg", "1")
    given = "--split-mode row --tensor-split 3,1 --main-gpu 1"
    assert given in " ".join(words)


def test_what_a_server_lacks_is_said_in_one_line(
    patched: Path, stock: Path, files: Files, older: Path
) -> None:
    text = (
        "a depth chosen by cost, no drafts from the text, no lookup files, no conversations on "
        "disk, no separate conversations for each API key, no types of the head chosen while "
        "loading"
    )
    assert serve(patched, files("plain")).stderr == ""
    for server, said in (
        (stock, f"no drafts with FastMTP vocabularies, no drafts in one graph, no {text}; "),
        (older, f"no {text}; "),
    ):
        (line,) = serve(server, files("plain")).stderr.splitlines()
        assert line.startswith("mtp-gguf: this llama-server (version: stand-in) has ")
        assert f" has {said}mtp-gguf build-server builds one" in line


def test_a_folder_for_conversations(
    patched: Path, stock: Path, files: Files, tmp_path: Path
) -> None:
    kept = ("--session-dir", tmp_path, "--session-size", "5G")
    words = printed(patched, files("plain"), *kept)
    assert words[-4:] == ["--session-dir", str(tmp_path), "--session-size", "4768"]  # MiB
    assert "cannot keep conversations on disk" in refusal(stock, files("plain"), *kept)
    kept = ("--session-dir", tmp_path, "--session-size", "5T")
    assert "--session-size" in serve(patched, files("plain"), *kept).stderr


def test_shared_conversations(patched: Path, stock: Path, files: Files) -> None:
    """A server that does not keep them apart needs no option for that."""
    assert printed(patched, files("plain"), "--share-sessions")[-1] == "--share-sessions"
    assert printed(patched, files("plain"))[-1] != "--share-sessions"
    assert "--share-sessions" not in printed(stock, files("plain"), "--share-sessions")


def test_drafts_from_the_text(patched: Path, stock: Path, copied: Copied) -> None:
    """With a head, without one, and where a profile says that the head does not pay."""
    model = copied("plain")
    assert "draft-mtp,lookup" in printed(patched, model, "--lookup")
    assert printed(patched, model, "--lookup", "--no-draft")[-2:] == ["--spec-type", "lookup"]
    assert "lookup" not in " ".join(printed(patched, model, "--no-lookup"))
    assert "cannot draft from the text" in refusal(stock, model, "--lookup")
    tune(model, DraftSettings(0), patched)
    words = printed(patched, model, "--lookup")
    assert words[-2:] == ["--spec-type", "lookup"]
    assert "--spec-draft-n-max" not in words


def test_lookup_files_are_indexed_for_the_server(
    patched: Path, stock: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same index as in process: one file in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = files("plain")
    text = tmp_path / "notes.md"
    text.write_text("some text of the user, 12 <|im_end|>")
    with closing(MTPLlama(str(model), n_ctx=64, n_threads=1, profile=False, lookup_files=[text])):
        made = list((tmp_path / "mtp-gguf" / "lookup").iterdir())
    for options in ((), ("--lookup",), ("--no-lookup",)):
        words = printed(patched, model, "--lookup-file", text, *options)
        assert "draft-mtp,lookup" in words
        assert [Path(words[words.index("--spec-lookup-index") + 1])] == made
    words = printed(patched, model, "--lookup-file", text, "--no-draft")
    assert words[-4:-1] == ["--spec-type", "lookup", "--spec-lookup-index"]
    assert "--spec-lookup-index" not in printed(patched, model, "--lookup")
    assert list((tmp_path / "mtp-gguf" / "lookup").iterdir()) == made
    made[0].write_bytes(made[0].read_bytes()[:-4])
    result = serve(patched, model, "--lookup-file", text)
    assert result.exit_code == 0
    assert "found a size that is not the one in its header" in result.stderr
    assert "it is built again" in result.stderr
    assert "cannot draft from lookup files" in refusal(stock, model, "--lookup-file", text)
    missing, binary = tmp_path / "missing.md", tmp_path / "binary"
    binary.write_bytes(b"\0\1")
    assert str(missing) in refusal(patched, model, "--lookup-file", missing)
    assert "expected UTF-8 text" in refusal(patched, model, "--lookup-file", binary)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "found none" in refusal(patched, model, "--lookup-file", empty)


def test_a_server_chooses_how_deep_where_it_can(
    patched: Path, stock: Path, files: Files, older: Path
) -> None:
    model = files("plain")
    for server in (older, stock):
        assert printed(server, model)[-2:] == ["--spec-draft-n-max", "1"]
        message = refusal(server, model, "--spec-draft-n-max", "auto")
        assert "number" in message
        assert "build-server" in message
    assert printed(patched, model, "--spec-draft-n-max", "auto")[-1] == "auto"


@pytest.mark.parametrize(
    "passed", [["--no-spec-draft-fused"], ["-ctkd", "q8_0"], ["--spec-type", "ngram-simple"]]
)
def test_a_server_that_must_draft_step_by_step_gets_a_number(
    passed: list[str], patched: Path, files: Files
) -> None:
    words = printed(patched, files("plain"), "--", *passed)
    assert words[words.index("--spec-draft-n-max") + 1] == "1"


@pytest.mark.parametrize("depth", ["0", "-1", "x", "", "auto:3", "1.5", "17"])
def test_a_depth_is_a_number_or_auto(depth: str, patched: Path, files: Files) -> None:
    message = refusal(patched, files("plain"), f"--spec-draft-n-max={depth}", code=2)
    assert "--spec-draft-n-max" in message


def test_the_user_says_how_deep_and_whether(patched: Path, files: Files) -> None:
    model = files("plain")
    assert printed(patched, model, "--spec-draft-n-max", 5)[-2:] == ["--spec-draft-n-max", "5"]
    assert "--spec-type" not in printed(patched, model, "--no-draft")
    assert "combined" in refusal(patched, model, "--no-draft", "--spec-draft-n-max", 2, code=2)


def test_the_usual_options_of_llama_server(patched: Path, files: Files) -> None:
    """They need no `--`, in our spelling and in llama-server's."""
    model = files("plain")
    for context in ("-c", "--ctx", "--ctx-size"):
        for layers in ("-ngl", "--gpu-layers", "--n-gpu-layers"):
            options = (context, 4096, "--parallel", 2, "-t", 3, layers, 5, "--api-key", "k")
            words = printed(patched, model, *options)
            given = "--ctx-size 4096 --parallel 2 --threads 3 --n-gpu-layers 5 --api-key k"
            assert words[-10:] == given.split()
    assert printed(patched, model, "-ngl", -1)[-1] == "all"
    assert printed(patched, model, "--depth", 2)[-2:] == ["--spec-draft-n-max", "2"]
    address = ("--host", "0.0.0.0")
    assert "--api-key" in refusal(patched, model, *address)
    assert printed(patched, model, *address, "--api-key", "k")


def test_a_limited_process_says_how_many_threads(
    limit: Limit, patched: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama-server itself counts the cores of the machine."""
    model = files("plain")
    assert "--threads" not in printed(patched, model)
    limit(3)
    words = printed(patched, model)
    assert words[words.index("--threads") + 1] == "3"
    for own in (("-t", "5"), ("--", "-t", "5"), ("--", "--threads", "5")):
        assert "3" not in printed(patched, model, *own)
    monkeypatch.setenv("LLAMA_ARG_THREADS", "5")
    assert "--threads" not in printed(patched, model)


def test_the_command_as_json(patched: Path, files: Files) -> None:
    said = json.loads(serve(patched, files("plain"), "--json").stdout)
    assert said["url"] == "http://127.0.0.1:8080"
    assert said["command"][0] == str(patched)


@pytest.mark.parametrize("passed", [["--api-key", "secret"], ["--api_key=secret"]])
def test_the_key_is_not_shown(passed: list[str]) -> None:
    shown = without_key(["llama-server", "-m", "m.gguf", *passed])
    assert "secret" not in " ".join(shown)
    assert "***" in shown[-1]


@pytest.mark.parametrize(
    ("architecture", "weights", "depth"),
    [("qwen35", 800e6, 1), ("qwen35", 4e9, 2), ("qwen35", 27e9, 2), ("qwen35moe", 35e9, 1)],
)
def test_without_a_word_the_depth_goes_by_size(
    architecture: str, weights: float, depth: int
) -> None:
    head = HeadReport(True, "", 24, {}, None, stock=True)
    file = ModelFile(Path("m.gguf"), head, False, architecture, (1024, 248320), int(weights))
    assert ServedModel(file, file).draft_depth == depth


def test_a_profile_is_followed_where_the_user_says_nothing(
    patched: Path, stock: Path, copied: Copied
) -> None:
    model = copied("ids")
    tune(model, DraftSettings(3, 128, "snapshot", 1), patched)
    more = ["--spec-draft-n-vocab", "128", "--spec-draft-threads", "1"]
    assert printed(patched, model)[-6:] == ["--spec-draft-n-max", "3", *more]
    words = printed(patched, model, "--spec-draft-n-max", 5)
    assert words[-6:] == ["--spec-draft-n-max", "5", *more]
    assert "--spec-type" not in printed(patched, model, "--no-draft")
    tune(model, DraftSettings(2, 128, "snapshot", 1), stock)
    assert printed(stock, model)[-2:] == ["--spec-draft-n-max", "2"]
    assert printed(patched, model)[-5] == "3"  # each kind of kernels has its own
    tune(model, DraftSettings(AUTO), patched)
    assert printed(patched, model)[-2:] == ["--spec-draft-n-max", "auto"]
    tune(model, DraftSettings(AUTO), stock)
    assert printed(stock, model)[-2:] == ["--spec-draft-n-max", "1"]


def test_the_type_of_the_head(patched: Path, stock: Path, files: Files) -> None:
    model = files("plain", "demo")
    assert printed(patched, model, "--mtp-type", "Q4_K")[-2:] == ["--spec-draft-head-type", "Q4_K"]
    assert "--spec-draft-head-type" not in printed(patched, model)
    assert "--mtp-type: expected one of q4_0, " in refusal(patched, model, "--mtp-type", "Q9")
    assert "cannot quantize a head while loading" in refusal(stock, model, "--mtp-type", "Q4_K")
    both = refusal(patched, model, "--mtp-type", "Q4_K", "--no-draft", code=2)
    assert "--no-draft cannot be combined with" in both


@pytest.mark.thorough
def test_the_type_of_the_head_is_measured(
    patched: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = serve(patched, files("plain", "demo"), "--mtp-type", "auto", "--threads", 1)
    assert result.exit_code == 0, result.output
    found = re.search(r"mtp-gguf: head (as stored|\w+): [\d.]+ times as many", result.stderr)
    assert found is not None, result.stderr
    chosen = found[1] if found[1] != "as stored" else None
    assert (f"--spec-draft-head-type {chosen}" in result.stdout) is (chosen is not None)


def test_a_profile_can_say_not_to_draft(patched: Path, copied: Copied) -> None:
    model = copied("ids")
    tune(model, DraftSettings(0), patched)
    result = serve(patched, model)
    assert "--spec-type" not in result.stdout
    assert "without drafting" in result.stderr
    assert "--spec-type" in printed(patched, model, "--spec-draft-n-max", 1)
    for mtp_type in ("Q4_K", "auto"):
        result = serve(patched, model, "--mtp-type", mtp_type)
        assert result.exit_code == 0, result.output
        assert f"--mtp-type: {mtp_type} has no effect, because nothing is drafted" in result.stderr


def test_a_profile_of_another_file_is_ignored_aloud(
    patched: Path, files: Files, copied: Copied
) -> None:
    model = copied("ids")
    tune(model, DraftSettings(3), patched)
    shutil.copy(files("plain"), model)
    result = serve(patched, model)
    assert result.stdout.split()[-1] == "auto"
    assert "ignored" in result.stderr


@pytest.mark.skipif(not has_kernels(), reason="this processor does not run the patched kernels")
def test_a_profile_of_other_kernels_is_ignored_aloud(
    patched: Path, stock: Path, copied: Copied
) -> None:
    """On stock kernels drafting may not pay where it does on those of patches/."""
    model = copied("ids")
    tune(model, DraftSettings(0), stock)
    result = serve(patched, model)
    assert result.stdout.split()[-1] == "auto"
    assert "measured with stock kernels instead of patches/" in result.stderr


def test_a_stock_server_takes_what_it_can_load_and_the_user_is_told(
    stock: Path, files: Files
) -> None:
    assert "draft-mtp" in printed(stock, files("plain"))
    result = serve(stock, files("ids"))
    assert result.exit_code == 0
    assert "draft-mtp" in result.stdout
    assert "ignores" in result.stderr
    assert "build-server" in result.stderr
    message = refusal(stock, files("table"))
    assert "table" in message
    assert "build-server" in message
    assert "--fastmtp-layout ids" in message
    # It could not load the file without drafting either.
    assert "table" in refusal(stock, files("table"), "--no-draft")


def test_a_server_from_before_mtp_is_refused(tmp_path: Path, files: Files) -> None:
    old = write_stand_in(tmp_path / "old", "--model FNAME")
    message = refusal(old, files("plain"))
    assert "draft-mtp" in message
    assert "--no-draft" in message
    assert "--spec-type" not in printed(old, files("plain"), "--no-draft")


def test_a_head_beside_the_model_is_found(
    patched: Path, files: Files, tmp_path: Path, copied: Copied
) -> None:
    model = copied("base")
    assert "-md" not in printed(patched, model)
    head = Path(shutil.copy(files("head"), tmp_path / "mtp-model.gguf"))
    assert printed(patched, model)[-2:] == ["-md", str(head)]
    assert "-md" not in printed(patched, model, "--no-draft")
    shutil.copy(files("sidecar"), tmp_path / "mtp-other.gguf")
    assert printed(patched, model)[-2:] == ["-md", str(head)]
    other = Path(shutil.copy(files("sidecar"), tmp_path / "mtp-model-Q8_0.gguf"))
    assert "-md" not in printed(patched, model)
    message = refusal(patched, model, "--depth", "2")
    assert "several heads are beside it (mtp-model-Q8_0.gguf, mtp-model.gguf); choose" in message
    assert printed(patched, model, "--head", other)[-2:] == ["-md", str(other)]


def test_a_head_that_shares_its_trunks_tensors(
    stock: Path, patched: Path, files: Files, tmp_path: Path, copied: Copied
) -> None:
    """Only the head of our own library takes them; llama.cpp's steps need a whole file."""
    model = copied("base")
    path = tmp_path / "mtp-model-shared-F16.gguf"
    head = write_sidecar(files("plain"), path, shared=True)
    assert printed(patched, model)[-2:] == ["-md", str(head)]
    assert printed(patched, model, "--head", head)[-2:] == ["-md", str(head)]
    for server, options in ((stock, ()), (patched, ("--", "--no-spec-draft-fused"))):
        message = refusal(server, model, *options)
        assert f"mtp-gguf graft {model} --from {head}" in message
        assert "-md" not in printed(server, model, "--no-draft", *options)
    other = files("plain", "moe-mixed")
    wrong = write_sidecar(files("plain", "dense-tied"), tmp_path / "mtp-x.gguf", shared=True)
    assert "its head does not fit" in refusal(patched, other, "--head", wrong)


def test_a_stock_server_cannot_take_a_short_sidecar(
    stock: Path, files: Files, tmp_path: Path, copied: Copied
) -> None:
    model = copied("base")
    shutil.copy(files("sidecar"), tmp_path / "mtp-model.gguf")
    assert "mtp-model.gguf" in refusal(stock, model)
    assert "-md" in printed(stock, model, "--head", files("head"))


def test_files_beside_that_do_not_fit_are_left_alone(
    patched: Path, files: Files, tmp_path: Path, copied: Copied
) -> None:
    model = copied("base")
    (tmp_path / "mtp-broken.gguf").write_bytes(b"GGUF")
    shutil.copy(files("plain"), tmp_path / "mtp-whole.gguf")
    assert "has no MTP head" in refusal(patched, model, "--depth", "2")


def test_a_model_without_a_head_is_served_with_drafts_from_its_text(
    patched: Path, stock: Path, files: Files, tmp_path: Path
) -> None:
    """As `generate` and `up` run it; with a depth, it is refused."""
    model = files("base")
    llama = write_tiny_llama(tmp_path / "llama.gguf")
    for path, options, drafts, note in (
        (model, (), False, "the file has no MTP head; mtp-gguf graft adds one"),  # recurrent states
        (model, ("--depth", "auto"), False, "the file has no MTP head"),
        (model, ("--lookup",), True, "the file has no MTP head"),
        (llama, (), True, "no MTP head for architecture 'llama' (mtp-gguf train-head can train"),
        (llama, ("--depth", "auto"), True, "no MTP head for architecture 'llama'"),
        (llama, ("--no-lookup",), False, "no MTP head for architecture 'llama'"),
    ):
        done = serve(patched, path, *options)
        assert done.exit_code == 0
        assert ("--spec-type lookup" in done.stdout) is drafts
        assert note in done.stderr
        told = "with drafts from its text" if drafts else "without drafts"
        assert f"; serving {told}\n" in done.stderr
    done = serve(stock, llama)
    assert "; serving without drafts\n" in done.stderr
    assert "--spec-type" not in done.stdout
    plan = invoke("up", model, "--llama-server", patched, "--dry-run", "--json")
    assert "--no-draft" not in json.loads(plan.stdout)["steps"][-1]["command"]
    plan = invoke("up", llama, "--llama-server", patched, "--dry-run")
    assert "for architecture 'llama' (mtp-gguf train-head can train one)\n" in plan.stdout
    assert "has no MTP head" in refusal(patched, model, "--depth", "2")
    generated = ("generate", model, "-p", "x", "-n", "2", "-t", "1")
    for options, code in (((), 0), (("--depth", "auto"), 0), (("--depth", "2"), 1)):
        assert invoke(*generated, *options).exit_code == code


def test_a_named_head_must_be_one(patched: Path, files: Files) -> None:
    assert "cannot draft" in refusal(patched, files("plain"), "--head", files("base"))
    assert "contains only a head" in refusal(patched, files("head"))


def test_any_shard_stands_for_the_model(patched: Path, files: Files) -> None:
    first = files("split")
    assert first.name.startswith("model-00001-of-")
    last = max(first.parent.iterdir())
    assert last != first
    assert printed(patched, last)[1] == str(first)


@pytest.mark.parametrize("content", [None, b"", b"GGUF\3\0\0\0", b"<html>"])
def test_no_model_no_command(content: bytes | None, patched: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    if content is not None:
        model.write_bytes(content)
    assert "model.gguf" in refusal(patched, model)


def test_a_checkpoint_is_for_up(patched: Path, tmp_path: Path) -> None:
    words = f"found a checkpoint; `mtp-gguf up {DEMO}` converts and serves it"
    assert words in refusal(patched, DEMO)
    assert "found a folder" in refusal(patched, tmp_path)


def test_a_folder_of_models(patched: Path, tmp_path: Path) -> None:
    for name in ("a b.gguf", "c.gguf", "d.gguf", "e.gguf"):
        (tmp_path / name).touch()
    named = f"found a folder; name a GGUF in it: '{tmp_path}/a b.gguf', {tmp_path}/c.gguf, "
    assert f"{named}{tmp_path}/d.gguf and 1 more" in refusal(patched, tmp_path)


def test_paths_are_quoted(files: Files, tmp_path: Path) -> None:
    folder = tmp_path / "it's $HOME; `a`"
    folder.mkdir()
    server = write_stand_in(folder / "llama server")
    model = Path(shutil.copy(files("plain"), folder / "m & m.gguf"))
    assert printed(server, model)[1] == str(model)


def test_what_follows_the_dashes_is_handed_on_untouched(patched: Path, files: Files) -> None:
    passed = ["--ctx-size", "32768", "--alias", "a b", "-ngl", "99", "--no-draft"]
    assert printed(patched, files("plain"), "--", *passed)[-7:] == passed


@pytest.mark.parametrize("option", ["--port", "--host", "-m", "--model"])
def test_what_serve_decides_stands_before_the_dashes(
    option: str, patched: Path, files: Files
) -> None:
    assert option in refusal(patched, files("plain"), "--", option, "1")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_public_address_needs_a_key_or_a_word(
    host: str, patched: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = files("plain")
    monkeypatch.delenv("LLAMA_API_KEY", raising=False)
    monkeypatch.delenv("LLAMA_ARG_API_KEY_FILE", raising=False)
    assert "--allow-public" in refusal(patched, model, "--host", host)
    assert printed(patched, model, "--host", host, "--allow-public")[3] == host
    for option in ("--api-key", "--api_key"):  # llama-server takes both
        assert printed(patched, model, "--host", host, "--", option, "k")[3] == host
    monkeypatch.setenv("LLAMA_API_KEY", "k")
    assert printed(patched, model, "--host", host)[3] == host


@pytest.mark.parametrize("key", ["", ",", '""', " , "])
@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1"])
def test_an_empty_key_is_refused(
    key: str, host: str, patched: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama-server drops it and answers everyone."""
    model = files("plain")
    for options in (("--api-key", key), ("--allow-public", "--", "--api_key", key)):
        message = refusal(patched, model, "--host", host, *options)
        assert "--api-key: expected an API key, found" in message
    assert refusal(patched, model, "--api-key", key, "--", "--api-key", "k")
    monkeypatch.setenv("LLAMA_API_KEY", key)
    if key:
        assert "LLAMA_API_KEY" in refusal(patched, model, "--host", host)
    else:  # not set, by convention
        assert printed(patched, model)


@pytest.mark.parametrize("content", [None, b"", b"\n\r\n", b"# a comment\n"])
def test_a_file_without_a_key_is_refused(
    content: bytes | None,
    patched: Path,
    files: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, keys = files("plain"), tmp_path / "keys"
    if content is None:
        keys.mkdir()  # llama-server reads a folder as an empty file
    else:
        keys.write_bytes(content)
    assert "--api-key-file: expected" in refusal(patched, model, "--", "--api-key-file", keys)
    if content is not None:
        keys.write_bytes(content + b"\nk\n")
        assert printed(patched, model, "--host", "0.0.0.0", "--", "--api-key-file", keys)
    monkeypatch.setenv("LLAMA_ARG_API_KEY_FILE", str(tmp_path / "missing"))
    assert "LLAMA_ARG_API_KEY_FILE" in refusal(patched, model)


@pytest.mark.parametrize(
    "host", ["", "127.0.0.1,0.0.0.0", "/tmp/a.sock", "no.such.host.invalid", "bad..host", "a" * 70]
)
def test_hosts_that_cannot_be_waited_for(host: str, patched: Path, files: Files) -> None:
    message = refusal(patched, files("plain"), "--host", host)
    assert "--host" in message
    assert "Errno" not in message


@pytest.mark.parametrize(
    "endpoints",
    ["", "127.0.0.1", ":1", "127.0.0.1:x", "127.0.0.1:1,", "127.0.0.1:99999", "bad..host:1"],
)
def test_a_helper_that_does_not_answer_is_named(
    endpoints: str, patched: Path, files: Files, free_port: int
) -> None:
    model = files("plain")
    assert printed(patched, model, "--rpc", "a:1,b:2")[6:8] == ["--rpc", "a:1,b:2"]
    result = invoke(
        "serve", model, "--llama-server", patched, "--port", free_port, "--rpc", endpoints
    )
    message = check_refusal(result.exit_code, result.stderr, "--rpc")
    assert "ggml-rpc-server" in message or "expected HOST:PORT" in message
    assert "Errno" not in message


def test_another_machines_address_asks_for_another_host(patched: Path, files: Files) -> None:
    public = ("--host", "192.0.2.1", "--allow-public")  # RFC 5737: nobody has it
    result = invoke("serve", files("plain"), "--llama-server", patched, *public)
    check_refusal(result.exit_code, result.stderr, "192.0.2.1", "choose another --host")


def test_an_occupied_port_is_named(patched: Path, files: Files) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        result = invoke("serve", files("plain"), "--llama-server", patched, "--port", port)
    check_refusal(result.exit_code, result.stderr, f"127.0.0.1:{port}", "--port")
