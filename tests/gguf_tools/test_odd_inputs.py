"""Pipes and devices in place of files, bytes in place of text: an error of one sentence."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_gguf.native import MTPLlama
from mtp_gguf.native.chat.pictures import Pictures
from mtp_gguf.native.checks.finite import first_not_finite
from mtp_gguf.native.checks.trial import try_model
from mtp_gguf.native.errors import ModelRefusedError, NativeError
from mtp_gguf.native.head import Head, check_head
from mtp_gguf.quantize.upstream import QuantizeError, quantize_file
from support.checkpoints import SMALL, write_checkpoint
from support.commands import check_refusal, deadline, invoke, refused, spawn, succeed

SECONDS = 20  # a process that takes longer is blocked on a pipe


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint `hf` and `model.gguf` made of it."""
    folder = tmp_path_factory.mktemp("sound")
    write_checkpoint(folder / "hf", SMALL)
    succeed("convert", folder / "hf", "-o", folder / "model.gguf", "--quant", "Q8_0")
    return folder


def a_fifo(folder: Path) -> Path:
    os.mkfifo(folder / "fifo.gguf")
    return folder / "fifo.gguf"


def a_socket(folder: Path) -> Path:
    here = os.getcwd()
    os.chdir(folder)  # the names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("socket.gguf")
    finally:
        os.chdir(here)
    return folder / "socket.gguf"


def a_device(_folder: Path) -> Path:
    return Path("/dev/zero")


COMMANDS = {
    "doctor": "doctor X",
    "doctor --load": "doctor X --load",
    "doctor --head": "doctor model.gguf --head X",
    "list-tensors": "list-tensors X",
    "compare": "compare X model.gguf",
    "compare with": "compare model.gguf X",
    "graft": "graft X --from model.gguf -o out.gguf",
    "graft --from": "graft model.gguf --from X -o out.gguf",
    "strip": "strip X -o out.gguf",
    "extract": "extract X -o out.gguf",
    "fastmtp add": "fastmtp add X -o out.gguf",
    "fastmtp show": "fastmtp show X",
    "fastmtp calibrate": "fastmtp calibrate X --prompts ids.txt -o out.gguf",
    "convert": "convert X -o out.gguf",
    "convert --imatrix": "convert hf --imatrix X -o out.gguf",
    "convert --mtp-from": "convert hf --mtp-from X -o out.gguf",
    "imatrix": "imatrix X -o out.gguf",
    "imatrix --merge": "imatrix model.gguf --merge X -o out.gguf",
    "quality": "quality X --reference model.gguf --text ids.txt",
    "quality --reference": "quality model.gguf --reference X --text ids.txt",
    "generate": "generate X -p a",
    "bench": "bench X",
    "bench --head": "bench model.gguf --head X --budget 1s",
    "tune": "tune X",
    "serve": "serve X",
    "serve --head": "serve model.gguf --head X",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("make", [a_fifo, a_socket, a_device])
def test_refused_at_once(
    command: str, make: Callable[[Path], Path], sound: Path, tmp_path: Path
) -> None:
    places = {"X": make(tmp_path), "out.gguf": tmp_path / "out.gguf"}
    (tmp_path / "ids.txt").write_text("1")
    words = [
        str(places.get(word, sound / word if (sound / word).exists() else word))
        for word in command.split()
    ]
    with deadline(SECONDS):
        result = invoke(*words)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.stderr.splitlines()[-1].startswith("mtp-gguf: "), result.stderr
    assert result.stderr.count("mtp-gguf: ") == 1
    assert not (tmp_path / "out.gguf").exists()


def test_a_head_from_a_pipe(sound: Path, tmp_path: Path) -> None:
    """libmtp opens this one."""
    with deadline(SECONDS), pytest.raises(NativeError, match="expected a file with content"):
        MTPLlama(str(sound / "model.gguf"), mtp_head=str(a_fifo(tmp_path)), depth=2)


@pytest.mark.parametrize("option", ["--corpus", "--ids"])
def test_text_may_come_through_a_pipe(option: str, sound: Path, tmp_path: Path) -> None:
    """As a shell's <(command) gives it."""
    read, write = os.pipe()
    text = b"".join(b"%d\n" % i for i in range(1000))

    def fill() -> None:
        os.write(write, text)
        os.close(write)

    writer = threading.Thread(target=fill)
    writer.start()
    with deadline(SECONDS):
        result = invoke(
            *("fastmtp", "add", sound / "model.gguf", option, f"/dev/fd/{read}"),
            *("-o", tmp_path / "out.gguf"),
        )
    writer.join()
    os.close(read)
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "out.gguf").exists()


def test_what_is_no_file(tmp_path: Path) -> None:
    words = ("none.gguf: expected a GGUF file, found none; create one with mtp-gguf convert",)
    refused(tmp_path, "generate", tmp_path / "none.gguf", "-p", "x", words=words)
    refused(tmp_path, "generate", tmp_path, "-p", "x", words=("found a folder",))


LATIN_1 = "caf\udce9"  # as Python keeps the byte E9 of an argument
ESCAPED = "caf\\udce9.gguf"


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("generate", "-p", LATIN_1), "--prompt"),
        (("generate", "--chat", "-p", LATIN_1), "--prompt"),
        (("chat", "--system", LATIN_1), "--system"),
    ],
)
def test_an_argument(words: tuple[str, ...], option: str, sound: Path, tmp_path: Path) -> None:
    command, *options = words
    said = (f"{option}: expected UTF-8", "invalid continuation byte")
    refused(tmp_path, command, sound / "model.gguf", *options, words=said)


@pytest.mark.parametrize("encoding", ["utf-8:surrogateescape", "utf-8:strict"])
def test_a_message_of_a_chat(encoding: str, sound: Path) -> None:
    """Python's treatment of such bytes depends on the locale."""
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    with spawn(
        *("chat", sound / "model.gguf"),
        stdin=subprocess.PIPE,
        errors="surrogateescape",
        env=environment,
    ) as process:
        _, stderr = process.communicate(f"{LATIN_1}\n", timeout=60)
    check_refusal(process.returncode, stderr, "the message: expected UTF-8")


@pytest.fixture
def no_text(sound: Path, tmp_path: Path) -> Path:
    """A model whose name is no valid text."""
    return Path(shutil.copy(sound / "model.gguf", tmp_path / f"{LATIN_1}.gguf"))


@pytest.fixture
def data(tmp_path: Path) -> tuple[object, ...]:
    """The options that name a text, whose name is no valid text, and two windows of it."""
    text = tmp_path / f"{LATIN_1}.txt"
    text.write_text("It is a book about files and their names. " * 40)
    return ("--text", text, "-c", 64, "--chunks", 2)


def test_an_imatrix_of_a_name_that_is_no_text(
    no_text: Path, data: tuple[object, ...], tmp_path: Path
) -> None:
    succeed("imatrix", no_text, *data, "-o", tmp_path / "imatrix.gguf")


def test_the_quality_of_a_name_that_is_no_text(
    no_text: Path, data: tuple[object, ...], tmp_path: Path
) -> None:
    page, logits = tmp_path / "q.html", tmp_path / "logits"
    options = ("--kl-divergence-base", logits, "--html", page, "--no-drafting")
    assert ESCAPED in succeed("quality", no_text, *data, "--reference", no_text, *options)
    assert ESCAPED in page.read_text(encoding="utf-8")


@pytest.mark.thorough
def test_the_speed_of_a_name_that_is_no_text(no_text: Path, tmp_path: Path) -> None:
    fast = ("--budget", "1s", "-n", 2, "--rounds", 1, "--no-server")
    assert ESCAPED in succeed("bench", no_text, *fast, "-o", tmp_path / "measured")
    written = (tmp_path / "measured" / "bench.json").read_text(encoding="utf-8")
    for text in (written, invoke("bench", no_text, *fast, "--json").stdout):
        assert json.loads(text)["model"]["file"] == no_text.name


def test_calls_with_a_name_that_is_no_text(no_text: Path) -> None:
    check_head(no_text, trunk=no_text, device="CPU", fastmtp_size=0)
    Head(no_text, trunk=no_text).close()
    assert first_not_finite(no_text, [1, 2, 3], 1) is None
    with pytest.raises(QuantizeError, match="requantizing"):
        quantize_file(no_text, no_text.with_suffix(".made"), 2)


def test_a_name_that_llama_cpp_cannot_pass_on(sound: Path, no_text: Path, tmp_path: Path) -> None:
    said = (f"{ESCAPED}: expected a path in UTF-8, found other bytes", "rename the file")
    refused(tmp_path, "generate", no_text, "-p", "It", words=said)
    refused(tmp_path, "generate", sound / "model.gguf", "--lora", no_text, "-p", "It", words=said)
    refused(tmp_path, "chat", no_text, words=said)
    with pytest.raises(ModelRefusedError, match="expected a path in UTF-8"):
        MTPLlama(str(no_text))
    with MTPLlama(str(sound / "model.gguf")) as llm:
        with pytest.raises(ModelRefusedError, match="expected a path in UTF-8"):
            Pictures(llm, no_text)
        said_of_it = try_model(no_text)
    assert said_of_it is not None
    assert said[0] in said_of_it


def test_json_of_an_error_about_a_name_that_is_no_text(tmp_path: Path) -> None:
    result = invoke("bench", tmp_path / LATIN_1, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout_bytes)["error"].startswith(f"{tmp_path / LATIN_1}: expected")


def test_names_of_files(sound: Path, tmp_path: Path) -> None:
    """They are printed as they are."""
    made = tmp_path / f"{LATIN_1}.gguf"
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    with spawn(
        *("convert", sound / "hf", "-o", made), env=environment, errors="surrogateescape"
    ) as process:
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert made.is_file()
    assert f"{LATIN_1}.gguf" in stdout
