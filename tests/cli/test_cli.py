"""The command line: help, progress, and output for scripts."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from mtp_gguf.cli import progress
from mtp_gguf.gguf_tools.machine.text import printable
from support.checkpoint_edits import edit_tensors
from support.checkpoints import SMALL, TINY
from support.commands import all_commands, invoke, spawn
from support.conversions import refused
from support.models import Models

COMMANDS = all_commands()


class TestHelp:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_says_what_each_option_does(self, command: str) -> None:
        for parameter in COMMANDS[command].params:
            text = "." if parameter.name == "help" else parameter.help
            assert text, parameter.name
            assert text.rstrip().endswith((".", "]", ")")), text

    def test_of_convert_has_all_options_and_examples(self) -> None:
        result = invoke("convert", "--help")
        assert result.exit_code == 0
        text = re.sub(r"[\s│╭╮╰╯─]+", " ", result.stdout)
        options = [
            option
            for parameter in COMMANDS["convert"].params
            for option in parameter.opts
            if option.startswith("--")
        ]
        assert len(options) >= 20
        assert all(option in text for option in options)
        for example in (
            "mtp-gguf convert Qwen/Qwen3.5-4B --mtp-f16 --fastmtp",
            "--quant Q5_K_M --mtp-type Q8_0 --imatrix",
            "--fastmtp-corpus notes.txt --dry-run",
        ):
            assert example in text
        for default in ("Q4_K_M", "Q8_0", "32768", "ids"):
            assert default in text

    @pytest.mark.parametrize("arguments", [["--help"], ["-h"], []])
    def test_names_the_commands(self, arguments: list[str]) -> None:
        text = invoke(*arguments).output
        for command in COMMANDS:
            assert command.split()[0] in text

    @pytest.mark.parametrize("command", ["fastmtp", *COMMANDS])
    def test_of_each_command(self, command: str) -> None:
        result = invoke(*command.split(), "-h")
        assert result.exit_code == 0
        assert f" {command} " in result.stdout

    def test_version(self) -> None:
        assert invoke("--version").stdout == f"mtp-gguf {version('mtp-gguf')}\n"


class TestUsage:
    def test_next_command_runs(self, models: Models, tmp_path: Path) -> None:
        """Whatever characters the path has: the summary ends with a line to be pasted."""
        output = tmp_path / "a $(b) 'c' \"d\" é.gguf"
        result = invoke("convert", models.checkpoint(SMALL), "-o", output)
        assert result.exit_code == 0, result.output
        program, *arguments = shlex.split(result.stdout.splitlines()[-1].removeprefix("next: "))
        assert program == "mtp-gguf"
        listed = invoke(*arguments)
        assert listed.exit_code == 0
        assert "can draft: MTP head in block 2" in listed.stdout

    def test_next_command_of_a_name_with_a_dash(
        self, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        for command in (
            ("convert", models.checkpoint(SMALL), "-o", "./-x.gguf"),
            ("strip", "./-x.gguf", "-o", "./-y.gguf"),
            ("graft", "./-y.gguf", "--from", "./-x.gguf", "-o", "./-z.gguf", "--no-check"),
        ):
            result = invoke(*command)
            assert result.exit_code == 0, result.output
            last = result.stdout.splitlines()[-1].removeprefix("next: mtp-gguf ")
            assert last.split()[1] == command[command.index("-o") + 1]
        fix = json.loads(invoke("doctor", "./-y.gguf", "--json").stdout)["findings"][0]["fix"]
        assert fix.startswith("mtp-gguf graft ./-y.gguf ")
        shutil.copytree(models.checkpoint(SMALL), "./-c")
        plan = invoke("up", "./-c", "--skip", "serve", "--dry-run", "--json")
        commands = [step["command"] for step in json.loads(plan.stdout)["steps"]]
        assert commands[0].startswith("mtp-gguf convert ./-c -o C-2.0M-Q4_K_M.gguf ")
        assert commands[1].startswith("mtp-gguf tune C-2.0M-Q4_K_M.gguf ")

    def test_next_command_of_a_file_without_a_head(self, models: Models, tmp_path: Path) -> None:
        arguments = ["convert", models.checkpoint(SMALL), "-o", tmp_path / "x.gguf", "--no-mtp"]
        assert invoke(*arguments).stdout.endswith(f"list-tensors {tmp_path / 'x.gguf'}\n")

    def test_as_a_process(self, models: Models, tmp_path: Path) -> None:
        arguments = ["convert", models.checkpoint(TINY), "-o", tmp_path / "x.gguf", "--json"]
        with spawn(*arguments) as process:
            stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 0
        assert not stderr
        assert json.loads(stdout)["files"][0]["path"] == str(tmp_path / "x.gguf")
        with spawn(*arguments) as process:
            stdout, stderr = process.communicate(timeout=60)
        assert process.returncode == 1
        assert json.loads(stdout)["exit_code"] == 1
        assert stderr == f"mtp-gguf: {json.loads(stdout)['error']}\n"

    def test_no_module_but_the_needed_ones(self, tmp_path: Path) -> None:
        """Help and listing come at once: neither llama.cpp nor the hub's client is loaded."""
        heavy = "('llama_cpp', 'huggingface_hub', 'tokenizers', 'gguf', 'torch', 'transformers')"
        check = (
            "import atexit, sys; "
            f"atexit.register(lambda: print([m for m in {heavy} if m in sys.modules]))"
        )
        with spawn("convert", "--help", prelude=check) as process:
            stdout, _ = process.communicate(timeout=60)
        assert stdout.endswith("[]\n")


class TestTerminal:
    """What comes from files must not steer the terminal."""

    def test_names_in_errors(self, models: Models, tmp_path: Path) -> None:
        model = models.copy(TINY, tmp_path)
        name = "model.\x1b[31m\r\n\x07\u202e"
        edit_tensors(model, lambda t: t.update({name: np.zeros((2, 2), np.float32)}))
        output = tmp_path / "output"
        output.mkdir()
        arguments = [model, "-o", output / "x.gguf", "--quant", "F16"]
        message = refused(arguments, "1 tensors are not part of this model", output=output)
        assert not {"\x1b", "\r", "\x07", "\u202e"} & {*message}

    def test_printable(self) -> None:
        assert printable("a\x1b[0m\né\u202e") == "a\\x1b[0m\\né\\u202e"


class TestProgress:
    def test_plain_lines(
        self, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(progress, "_PLAIN_PROGRESS_SECONDS", 0)
        result = invoke("convert", models.checkpoint(SMALL), "-o", tmp_path / "x.gguf")
        assert result.exit_code == 0
        lines = result.stderr.splitlines()
        assert len(lines) > 10
        shares = []
        for line in lines:
            match = re.fullmatch(
                r"convert: (\d+)%, [\d.]+ [kMG]?B/s, \d+ s left, \d+ cores \d+% busy", line
            )
            assert match is not None, line
            shares.append(int(match[1]))
        assert shares == sorted(shares)
        assert "B/s" not in result.stdout

    def test_silent_when_short(self, models: Models, tmp_path: Path) -> None:
        assert not invoke("convert", models.checkpoint(SMALL), "-o", tmp_path / "x.gguf").stderr


def test_an_error_of_the_system_without_words_is_named_by_its_kind() -> None:
    app = typer.Typer()

    @app.command()
    @progress.reports_errors
    def fails() -> None:
        raise IsADirectoryError

    assert CliRunner().invoke(app).output == "mtp-gguf: IsADirectoryError\n"
