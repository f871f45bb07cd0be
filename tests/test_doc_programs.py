"""What the documentation shows runs: its programs, its commands, and the output that follows `$`.

Programs of docs/ecosystem.md run with `pytest -m ecosystem`. NOT_RUN names the commands that do not
run here.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from glob import glob
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.convert.heads.acceptance import VARIABLE
from support.checkpoint_edits import edit_tensors
from support.commands import invoke, run_python
from support.hub_commands import environment
from support.hub_server import Hub
from support.models import DEMO, ROOT, Models
from support.pages import PAGES, blocks, fits, words_of
from support.real_server import SETTINGS
from support.serving import PATIENCE, serving

HTTP_PORT, OWN_PORT = "8080", "8000"  # in the programs: of a server that runs, and of their own
LONGEST = 512  # tokens of the demo's context


def programs(*, with_words: str = "") -> list[Any]:
    """The Python programs of all pages but ecosystem.md that have these words."""
    return [
        pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        if page.name != "ecosystem.md"
        for number, code in enumerate(blocks(page, "python"))
        if with_words in code
    ]


SPECIAL = ("uvicorn.run", "OWNER/NAME", f"127.0.0.1:{HTTP_PORT}")


def short(program: str) -> str:
    program = re.sub(r"n_ctx=\d+", f"n_ctx={LONGEST}", program)
    return re.sub(r"minutes=\d+", "minutes=0.1", program)


@pytest.fixture(scope="module")
def model(models: Models) -> Path:
    return models.gguf("demo", "Q4_K_M", "F16")


@pytest.fixture
def folder(model: Path, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the model, its checkpoint, its file without a head, and a text."""
    shutil.copy(__file__, tmp_path / "notes.txt")
    (tmp_path / "model.gguf").symlink_to(model)
    (tmp_path / "Qwen3.5-4B").symlink_to(DEMO)
    shutil.copy(models.convert("demo", "--no-mtp"), tmp_path / "base.gguf")
    monkeypatch.chdir(tmp_path)
    return tmp_path


class TestPrograms:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        "program", [p for p in programs() if not any(words in p.values[0] for words in SPECIAL)]
    )
    def test_alone(self, program: str, folder: Path) -> None:
        run_python(short(program), cwd=folder)

    @pytest.mark.parametrize("program", programs(with_words="OWNER/NAME"))
    def test_with_the_hub(self, program: str, folder: Path) -> None:
        (folder / "published").mkdir()
        shutil.copy(folder / "model.gguf", folder / "published" / "Name-Q4_K_M.gguf")
        with Hub("OWNER/NAME", {"main": folder / "published"}) as hub:
            run_python(short(program), cwd=folder, env=environment(hub, folder / "home"))

    @pytest.mark.server
    @pytest.mark.parametrize("program", programs(with_words=f"127.0.0.1:{HTTP_PORT}"))
    def test_with_a_server(
        self, program: str, folder: Path, patched_server: Path, free_port: int
    ) -> None:
        with serving(patched_server, folder / "model.gguf", free_port, *SETTINGS) as run:
            run.until("ready")
            assert run_python(program.replace(HTTP_PORT, str(free_port)), cwd=folder).strip()

    @pytest.mark.parametrize("program", programs(with_words="uvicorn.run"))
    def test_servers(self, program: str, folder: Path, free_port: int) -> None:
        code = short(program).replace(f"port={OWN_PORT}", f"port={free_port}")
        log = folder / "log"
        with (
            log.open("w") as output,
            subprocess.Popen([sys.executable, "-c", code], stdout=output, stderr=output) as process,
        ):
            try:
                answer = ask(process, f"http://127.0.0.1:{free_port}/v1/completions")
            finally:
                process.send_signal(signal.SIGINT)
        assert answer["choices"][0]["text"], log.read_text()
        assert "stock libraries" not in log.read_text()


def ask(process: subprocess.Popen[bytes], url: str) -> Any:
    """What a server answers to a prompt, once it listens."""
    body = json.dumps({"prompt": "def is_prime(n):\n", "max_tokens": 8}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(request) as answer:
            return json.load(answer)
        time.sleep(0.1)
    raise AssertionError("the server did not answer")


def test_every_program_is_run() -> None:
    special = [p for words in SPECIAL for p in programs(with_words=words)]
    assert len(special) == 3
    assert len(programs()) > 5


def transcripts(page: Path) -> list[str]:
    """The blocks of a page that show commands of ours after a `$` and what they print."""
    found = [*blocks(page, ""), *blocks(page, "console")]
    return [block for block in found if block.startswith("$ mtp-gguf ")]


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if transcripts(page)],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_transcripts(
    page: Path, models: Models, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows a `$` is what the command prints; `…` stands for any lines."""
    (folder / "demo_model").symlink_to(DEMO)
    (folder / "Demo").symlink_to(DEMO)
    for transcript in "\n".join(transcripts(page)).removeprefix("$ ").split("\n$ "):
        command, _, expected = transcript.partition("\n")
        monkeypatch.setenv(VARIABLE, str(int("acceptance: " in expected)))
        result = invoke(*words_of(command)[1:])
        assert result.exit_code == (1 if "fault: " in expected else 0), result.output
        assert fits(expected.strip("\n"), result.output.strip("\n")), result.output


# Commands that only other tests run, by words in them, and why.
NOT_RUN = {
    r"OWNER/NAME": "needs a hub: tests/gguf_tools/test_hub_gguf.py",
    r"^(up|build-server)\b": "downloads or builds: tests/convert/test_hub.py, tests/server",
    r"^serve\b": "runs until it is stopped: tests/server",
    r"^(bench|tune)\b": "takes minutes: tests/bench",
    r"^kernels\b": "needs another llama.cpp: tests/kernels/test_plugged.py",
    r"^chat\b": "needs a terminal: tests/cli/test_chat.py",
    r"^train-head\b": "takes minutes: tests/train",
    r"^carry\b": "needs a model of another architecture: tests/gguf_tools/test_carrier.py",
    r'--session .* -p ""': "continues what another command wrote: tests/cli/test_session_option.py",
    r"--image": "needs a picture and a vision tower: tests/native/test_pictures.py",
    r"-ngl": "needs a GPU: tests/native/test_gpu.py",
    r"--mtp-type auto": "takes minutes: tests/convert/test_head_choice.py",
    r"--imatrix": "needs the output of llama-imatrix: tests/convert/test_convert_gguf.py",
    r"^imatrix\b": "takes minutes: tests/bench/test_imatrix.py",
    r"^quality\b": "takes minutes: tests/bench/test_quality.py",
    r"^publish\b": "needs a hub: tests/publish/test_publish.py",
    r"--stream": "needs a hub: tests/convert/test_stream.py",
    r"^0\.1\.0, ": "is the first line that info prints",
    r"…": "is no whole command",
}


def commands(page: Path) -> list[str]:
    """The commands of ours that stand alone on a line of a page's blocks."""
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    found = [line.partition(" #")[0].strip() for line in lines]
    ours = [line.removeprefix("mtp-gguf ") for line in found if line.startswith("mtp-gguf ")]
    return [line for line in ours if not any(re.search(words, line) for words in NOT_RUN)]


# What the demo stands for in the commands: checkpoints, and files by the options that make them.
CHECKPOINTS = ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B", "Qwen3.5-4B", "MODEL", "gguf_tools/demo_model")
FILES = {
    **dict.fromkeys(("model.gguf", "out.gguf", "other.gguf"), ("--mtp-f16",)),
    **dict.fromkeys(
        ("Qwen3.5-4B-BF16.gguf", "Qwen3.5-9B-BF16.gguf"), ("--quant", "BF16", "--mtp-type", "BF16")
    ),
    "Qwen3.5-9B-Q4_K_M.gguf": ("--no-mtp",),
    "trunk-BF16.gguf": ("--quant", "BF16", "--no-mtp"),
}
TEXTS = ("notes/a.txt", "notes/b.txt", "src/a.py", "a.py", "b.py", "question.txt", "edit.txt")


@pytest.mark.sample(11)
@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, id=f"{page.relative_to(ROOT)}: {line}")
        for page in PAGES
        for line in commands(page)
    ],
)
def test_commands(
    line: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in CHECKPOINTS:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).symlink_to(DEMO)
    shutil.copytree(DEMO, "Finetune")
    edit_tensors(Path("Finetune"), lambda t: [t.pop(name) for name in [*t] if "mtp." in name])
    for name in TEXTS:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("def is_prime(n):\n    return n > 1\n", encoding="utf-8")
    Path("ranked.json").write_text(json.dumps([*range(1100)]), encoding="utf-8")
    for name, options in FILES.items():
        if name in line and f"-o {name}" not in line:
            shutil.copy(models.convert("demo", *options), name)
    words = words_of(line.replace("16384", "1024"))  # the demo has 4,096 tokens
    result = invoke(*(name for word in words for name in sorted(glob(word)) or [word]))
    assert result.exit_code == 0, result.output


def test_reasons_apply() -> None:
    """Every reason not to run a command has a command that is not run for it."""
    lines = [line for page in PAGES for block in blocks(page, "") for line in block.splitlines()]
    found = [line.removeprefix("mtp-gguf ") for line in lines]
    assert all(any(re.search(words, line) for line in found) for words in NOT_RUN)
