"""Spelling, parsing and refusal of options, and exit codes: the same in every command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from mtp_gguf.cli.demo import PROMPT, shell_word
from mtp_gguf.cli.options import parse_bytes
from support.checkpoint_edits import write_repeating
from support.checkpoints import TINY, Spec
from support.commands import (
    MAIN,
    all_commands,
    check_refusal,
    invoke,
    refused,
    run_python,
    spawn,
    succeed,
)
from support.models import Models
from support.terminals import on_a_terminal

USAGE, BROKEN_PIPE = 2, 141


@pytest.fixture(scope="module")
def model(models: Models) -> Path:
    """The demo's GGUF, never written to."""
    return models.convert("demo", "--mtp-f16", "--fastmtp")


@pytest.mark.parametrize(
    ("text", "size"),
    [("5002496", 5002496), ("07", 7), ("3k", 3000), ("500M", 5 * 10**8), ("4G", 4 * 10**9)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "0K", "-1", "1.5G", "4T", "4GB", "٤", "9" * 19])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected bytes, or a number and K, M or G"):
        parse_bytes(text)


def generated(model: Path, *options: object, **kwargs: Any) -> str:
    """What `generate` prints in a process of its own, on one thread."""
    command = [sys.executable, "-c", MAIN, "generate", model, "-t", "1", "-c", "256", *options]
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, timeout=120, **kwargs
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


COMMANDS = all_commands()


class TestSpelling:
    def test_one_meaning_one_spelling(self) -> None:
        """What two commands share, both spell alike; what is old, none of them shows."""
        shown = {opt for command in COMMANDS.values() for p in command.params for opt in p.opts}
        assert {"--ctx", "--temp", "--from", "--tokens", "--gpu-layers", "--depth"} <= shown
        assert not {"--context", "--temperature", "--mtp-from"} & shown
        for name, command in COMMANDS.items():
            for param in command.params:
                for short, long in (("-n", "--tokens"), ("-c", "--ctx"), ("-ngl", "--gpu-layers")):
                    assert (short in param.opts) <= (long in param.opts), (name, param.opts)

    @pytest.mark.parametrize("command", COMMANDS)
    def test_every_command_has_json(self, command: str) -> None:
        assert any("--json" in param.opts for param in COMMANDS[command].params)

    @pytest.mark.parametrize("command", COMMANDS)
    def test_help_begins_with_one_short_line(self, command: str) -> None:
        first = (COMMANDS[command].help or "").splitlines()[0]
        assert len(first) < 72
        assert first.endswith(".")

    def test_earlier_spellings_are_read_and_not_shown(self, models: Models, tmp_path: Path) -> None:
        succeed("convert", models.checkpoint(TINY), "-o", tmp_path / "a.gguf", "--no-mtp")
        for option in ("--from", "--mtp-from", "--source"):
            options = ("--quant", "F16", "--dry-run", "--json")
            donor = models.checkpoint(TINY)
            planned = invoke("convert", models.checkpoint(TINY), option, donor, *options)
            assert "blk.2.nextn.eh_proj.weight" in planned.stdout
        options = ("--outtype", "bf16", "--dry-run", "--json")
        planned = json.loads(invoke("convert", models.checkpoint(TINY), *options).stdout)
        assert planned["quant"] == "BF16"
        text = invoke("convert", "--help").stdout
        assert "--from" in text
        assert "--outtype (--quant)" in text
        assert "--mtp-from" not in text

    def test_spellings_of_llama_cpp_are_in_the_help(self) -> None:
        text = " ".join(invoke("generate", "--help").stdout.split())
        assert "Also accepted: -m (MODEL);" in text
        assert "--predict, --n-predict, --max-tokens (--tokens)" in text
        assert "--context" not in text

    @pytest.mark.thorough
    def test_the_model_as_llama_cpp_spells_it(self, model: Path) -> None:
        expected = generated(model, "-p", "-m", "-n", "4")
        for words in (("-m", model), (f"--model={model}",), ("--model", model)):
            done = invoke("generate", "-p", "-m", "-n", "4", "-t", "1", "-c", "256", *words)
            assert done.stdout == expected
        listed = invoke("list-tensors", model).stdout
        assert invoke("list-tensors", "-m", model).stdout == listed
        assert invoke("compare", model, "-m", model).exit_code == 0
        done = invoke("generate", model, "-m", model, "-p", "x")
        check_refusal(done.exit_code, done.stderr, "unexpected extra argument", code=USAGE)

    @pytest.mark.parametrize("width", [40, 200])
    def test_help_has_the_stars_of_file_names(
        self, width: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Markdown takes two of them for emphasis."""
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERMINAL_WIDTH", str(width))
        shown = 0
        for name, command in COMMANDS.items():
            text = re.sub("[│`\\s]", "", invoke(*name.split(), "--help").stdout)
            helps = [command.help or "", *(getattr(p, "help", "") or "" for p in command.params)]
            for paragraph in re.split(r"\n\n|(?<=[.:;,]) ", "\n\n".join(helps)):
                words = re.sub(r"\*\*|[`\s]", "", paragraph)
                if "*" in words:
                    assert words in text
                    shown += 1
        assert shown > 3

    @pytest.mark.sample(6)
    @pytest.mark.parametrize("command", ["", *COMMANDS])
    def test_help_in_every_width(self, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for width in (40, 100):
            monkeypatch.setenv("COLUMNS", str(width))
            monkeypatch.setenv("TERMINAL_WIDTH", str(width))
            text = invoke(*command.split(), "--help").stdout
            assert max(map(len, text.splitlines())) <= width
            assert not re.search(r"<bool>|\{[A-Z]|\[\[|[a-z]…", text)
            for param in COMMANDS[command].params if command else ():
                assert all(name in text for name in param.opts if name.startswith("--"))

    @pytest.mark.thorough
    def test_generate_in_both_spellings(self, model: Path) -> None:
        new = generated(model, "-p", "def f", "-n", "6", "--ctx", "64", "--temp", "0.5")
        old = ("--n-predict=6", "--context", "64", "--temperature", "0.5")
        assert generated(model, "-p", "def f", *old) == new


class TestLists:
    """An option that takes several files leaves the model alone."""

    @pytest.mark.parametrize("name", ["demo.gguf", "no-suffix"])
    def test_the_model_after_the_corpus(self, name: str, model: Path, tmp_path: Path) -> None:
        notes = [tmp_path / "a.txt", tmp_path / "b.txt"]
        for note in notes:
            note.write_text("def f(x):\n    return x\n")
        copy = tmp_path / name
        copy.write_bytes(model.read_bytes())
        arguments = ("--corpus", *notes, copy, "-o", tmp_path / "out.gguf", "--json")
        done = invoke("fastmtp", "add", *arguments)
        assert done.exit_code == 0, done.output
        assert "of 2 files" in done.stderr

    def test_convert_and_graft(self, model: Path, tmp_path: Path) -> None:
        note = tmp_path / "a.txt"
        note.write_text("def f(x):\n    return x\n")
        trunk = tmp_path / "trunk.gguf"
        assert invoke("strip", model, "-o", trunk).exit_code == 0
        arguments = ("--fastmtp-corpus", note, trunk, "--from", model, "--no-check")
        succeed("graft", *arguments, "-o", tmp_path / "whole.gguf")

    def test_a_gguf_is_no_corpus(self, model: Path) -> None:
        done = invoke("fastmtp", "add", "--corpus", model)
        check_refusal(done.exit_code, done.stderr, "MODEL", code=USAGE)
        done = invoke("fastmtp", "add", model, "--corpus", model)
        check_refusal(done.exit_code, done.stderr, "--corpus", "found a GGUF", code=USAGE)

    def test_an_earlier_spelling_takes_several_files_too(self, model: Path, tmp_path: Path) -> None:
        files = [tmp_path / "a.txt", tmp_path / "b.txt"]
        for file in files:
            file.touch()
        done = invoke("fastmtp", "calibrate", "--prompts", *files, model)
        words = f"--prompt-file: no text in {files[0]}, {files[1]}"
        check_refusal(done.exit_code, done.stderr, words)

    def test_errors_name_the_option_of_the_command(self, model: Path, tmp_path: Path) -> None:
        for option in ("--corpus", "--ids"):
            done = invoke("fastmtp", "add", model, option, tmp_path / "absent")
            assert f"mtp-gguf: {option}: {tmp_path / 'absent'}" in done.stderr
        done = invoke("generate", model, "-p", "x", "--lora", tmp_path / "absent")
        check_refusal(done.exit_code, done.stderr, "--lora: expected")


class TestRefusals:
    @pytest.mark.parametrize(
        "arguments",
        [
            ("bench", "MODEL", "--full", "--budget", "1m"),
            ("tune", "MODEL", "--full", "--budget", "1m"),
            ("bench", "MODEL", "--budget", "soon"),
            ("bench", "MODEL", "--depths", "x"),
            ("bench", "MODEL", "--ctx", "x"),
            ("bench", "MODEL", "--fastmtp-sizes", "x"),
            ("bench", "MODEL", "--prompts", "poems"),
            ("bench", "MODEL", "--no-server", "--llama-server", "x"),
            ("generate", "MODEL", "-p", "x", "--depth", "5", "--max-depth", "3"),
            ("generate", "MODEL", "-p", "x", "-f", "y"),
            ("generate", "MODEL", "-p", "x", "--rollback", "two-phase"),
            ("generate", "MODEL", "-p", "x", "--json-schema", "[1]"),
            ("fastmtp", "show", "MODEL", "--ids", "--json"),
            ("build-server", "--where", "--clean"),
            ("build-server", "--where", "-j", "2"),
            ("build-server", "--cmake-args", "-DX='a"),
            ("serve", "-hf", "OWNER/NAME:Q4_K_M", "model.gguf"),
        ],
        ids=" ".join,
    )
    def test_wrong_usage_exits_with_2(self, arguments: tuple[str, ...], model: Path) -> None:
        words = [str(model) if word == "MODEL" else word for word in arguments]
        done = invoke(*words)
        check_refusal(done.exit_code, done.stderr, code=USAGE)
        assert "Value error" not in done.stderr  # the words of a library

    def test_serving_at_depth_0_is_no_draft(self, model: Path) -> None:
        for depth, words in (("0", ("--no-draft",)), ("x", ("1 to 16, or auto",))):
            done = invoke("serve", model, "--depth", depth)
            check_refusal(done.exit_code, done.stderr, *words, f"found '{depth}'", code=USAGE)

    def test_as_json_too(self, model: Path, tmp_path: Path) -> None:
        for arguments, code in (
            (("generate", model, "--json", "-p", "x", "--depth", "x"), USAGE),
            (("generate", model, "--json", "--nonsense"), USAGE),
            (("doctor", tmp_path / "absent.gguf", "--json"), 1),
            (("fastmtp", "show", tmp_path / "absent.gguf", "--json"), 1),
        ):
            done = invoke(*arguments)
            assert done.exit_code == code
            said = json.loads(done.stdout)
            assert said["exit_code"] == code
            assert said["error"]

    def test_a_filter_that_matches_nothing(self, model: Path) -> None:
        for command in (("list-tensors", model), ("compare", model, model)):
            done = invoke(*command, "--filter", "xyz")
            check_refusal(done.exit_code, done.stderr, "--filter", "'xyz'")

    def test_a_download_that_was_cut_is_called_that(self, model: Path, tmp_path: Path) -> None:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(model.read_bytes()[:-1000])
        for command in (("list-tensors",), ("doctor",), ("strip",), ("generate", "-p", "x")):
            done = invoke(command[0], cut, *command[1:])
            words = ("found a file of", "truncated", "fetch it again")
            check_refusal(done.exit_code, done.stderr, *words)
        for size in (5, 100, 2000, 70_000):  # in the header
            cut.write_bytes(model.read_bytes()[:size])
            done = invoke("list-tensors", cut)
            check_refusal(done.exit_code, done.stderr, "the file is cut off or damaged: fetch it")

    def test_did_you_mean(self) -> None:
        done = invoke("doktor")
        check_refusal(done.exit_code, done.stderr, "Did you mean 'doctor'?", code=USAGE)

    @pytest.mark.parametrize(
        ("option", "name", "near"),
        [
            ("--quant", "Q4KM", "Q4_K_M"),
            ("--quant", "q4-k", "Q4_K_M or Q4_K_S"),
            ("--outtype", "BF15", "BF16"),
            ("--also", "q8", "Q8_0"),
            ("--mtp-type", "fp16", "F16"),
            ("--mmproj=BF", "", "BF16"),
        ],
    )
    def test_did_you_mean_this_type(
        self, option: str, name: str, near: str, models: Models
    ) -> None:
        words = ("convert", models.checkpoint(TINY), "--dry-run", option, *filter(None, [name]))
        done = invoke(*words)
        check_refusal(done.exit_code, done.stderr, f"(did you mean {near}?)", code=USAGE)

    @pytest.mark.parametrize(
        ("command", "output", "words"),
        [
            ("convert", "-", ("found -", "standard output")),
            ("extract", "new/", ("expected a folder that exists", "mkdir -p new/")),
            ("convert", "w.safetensors", ("such as w.gguf", "another format")),
            ("strip", "q.bin", ("such as q.gguf", "another format")),
            ("fastmtp add", "q.bin", ("such as q.gguf", "another format")),
        ],
    )
    def test_outputs_that_cannot_be(
        self,
        command: str,
        output: str,
        words: tuple[str, ...],
        model: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        arguments = (*command.split(), model, "-o", output)
        refused(tmp_path, *arguments, words=("'-o'", *words), code=USAGE)

    def test_an_option_of_llama_server(self, model: Path) -> None:
        done = invoke("serve", model, "--cache-reuse", "256")
        words = ("--cache-reuse. An option", "goes after `--`", "-- --cache-reuse")
        check_refusal(done.exit_code, done.stderr, *words, code=USAGE)


class TestEnds:
    def test_ctrl_c_exits_with_130(self, models: Models, tmp_path: Path) -> None:
        """And says that nothing was written only where something would have been."""
        slow = (
            "import time; from mtp_gguf.gguf_tools.heads import transplant\n"
            "import mtp_gguf.cli.list_tensors as listing\n"
            "def wait(*_):\n    print('on', flush=True); time.sleep(60)\n"
            "transplant.strip = listing.read_listing = wait"
        )
        model = tmp_path / "m.gguf"
        assert invoke("convert", models.checkpoint(TINY), "-o", model).exit_code == 0
        for command, number, said in (
            (("list-tensors", model), signal.SIGINT, "interrupted\n"),
            (("strip", model), signal.SIGINT, "interrupted; nothing was written\n"),
            (("strip", model), signal.SIGTERM, "interrupted; nothing was written\n"),
        ):
            with spawn(*command, prelude=slow, cwd=tmp_path) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "on\n"
                time.sleep(0.1)
                process.send_signal(number)
                _, stderr = process.communicate(timeout=60)
            assert stderr == f"mtp-gguf: {said}"
            assert process.returncode == 128 + number

    def test_ctrl_c_while_modules_are_imported(self, model: Path) -> None:
        slow = (
            "import sys, time\n"
            "class Slow:\n"
            "    def find_spec(self, name, *_):\n"
            "        if name == 'mtp_gguf.cli.options':\n"
            "            print('on', flush=True); time.sleep(60)\n"
            "sys.meta_path.insert(0, Slow())"
        )
        with spawn("list-tensors", model, prelude=slow) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "on\n"
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=60)
        assert stderr == "mtp-gguf: interrupted\n"
        assert process.returncode == 130

    @pytest.mark.parametrize("unbuffered", ["", "1"])
    def test_a_closed_pipe_is_quiet(self, unbuffered: str, model: Path) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        with (
            os.fdopen(writing, "wb") as closed,
            spawn("list-tensors", model, stdout=closed, env=environment) as process,
        ):
            _, stderr = process.communicate(timeout=60)
        assert stderr == ""
        assert process.returncode == BROKEN_PIPE

    def test_without_an_output_at_all(self, model: Path) -> None:
        script = f'"{sys.executable}" -c "$0" list-tensors "$1" >&-'
        done = subprocess.run(
            ["sh", "-c", script, MAIN, str(model)], capture_output=True, text=True, check=False
        )
        assert done.stderr == ""
        assert done.returncode == 0


class TestTerminal:
    @pytest.mark.parametrize("columns", [40, 120])
    def test_a_bar(self, columns: int) -> None:
        """In one line, and nothing in it is cut off."""
        code = (
            "import time\nfrom mtp_gguf.cli.progress import byte_progress\n"
            "with byte_progress('convert', 10**10) as progress:\n"
            "    for _ in range(3): progress(10**9); time.sleep(0.3)\n"
        )
        environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
        environment.pop("NO_COLOR", None)
        shown = on_a_terminal([sys.executable, "-c", code], "stderr", env=environment)
        plain = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", shown)
        if columns == 40:
            assert re.search(r"convert +10% +\d+:\d\d:\d\d|convert +10% +-:--:--", plain), plain
        else:
            assert re.search(r"convert .*━.*[1-3]0%.*[MG]B/s .*0:00:\d\d", plain), plain
        assert "…" not in plain
        assert all(len(line) <= columns for line in re.split(r"[\r\n]+", plain))

    @pytest.mark.thorough
    def test_a_conversion_has_a_bar(self, tmp_path: Path) -> None:
        source = write_repeating(tmp_path / "large", Spec("large", hidden=1024, intermediate=3584))
        words = ["convert", source, "-o", tmp_path / "x.gguf", "--threads", "1"]
        environment = {**os.environ, "COLUMNS": "120", "TERM": "xterm"}
        environment.pop("NO_COLOR", None)
        with (tmp_path / "stdout").open("w+") as stdout:
            program = [sys.executable, "-c", MAIN, *words]
            shown = on_a_terminal(program, "stderr", stdout=stdout, env=environment)
            stdout.seek(0)
            assert stdout.read().startswith("base: ")
        for part in (r"convert .*━", r"\d+%", r"\d+ [MG]B/s", r"0:00:\d\d"):
            assert re.search(part, shown), part

    @pytest.mark.thorough
    @pytest.mark.sample(1)
    @pytest.mark.parametrize("command", ["tune", "bench"])
    def test_the_plan_is_not_in_the_status_line(self, command: str, model: Path) -> None:
        option = "--dry-run" if command == "tune" else "--no-server"
        words = (command, model, "--budget", "1s", "--json", "-t", "1", option)
        program = (sys.executable, "-c", MAIN, *words)
        shown = on_a_terminal(program, "stderr", stdout=subprocess.DEVNULL)
        assert re.search(r"(\n|\r|\x1b\[2K)plan: about", shown), shown


class TestGenerate:
    @pytest.mark.thorough
    def test_the_prompt_from_a_file_or_standard_input(self, model: Path, tmp_path: Path) -> None:
        text = "def is_prime(n):\n"
        expected = generated(model, "-p", text, "-n", "8")
        (tmp_path / "prompt.txt").write_text(f"{text}\n")  # an editor's line break is none of it
        assert generated(model, "-f", tmp_path / "prompt.txt", "-n", "8") == expected
        assert generated(model, "-n", "8", input=f"{text}\n") == expected
        assert generated(model, "-f", "-", "-n", "8", input=f"{text}\n") == expected

    def test_no_prompt_at_all(self, model: Path, tmp_path: Path) -> None:
        done = invoke("generate", model, "-t", "1")
        check_refusal(done.exit_code, done.stderr, "standard input: expected 1 to", "found 0")
        (tmp_path / "none.txt").touch()
        done = invoke("generate", model, "-t", "1", "-f", tmp_path / "none.txt")
        check_refusal(done.exit_code, done.stderr, "--prompt-file: expected 1 to", "found 0")

    def test_chat(self, model: Path) -> None:
        wrapped = "<|im_start|>user\nWhat does os.path.join do?<|im_end|>\n<|im_start|>assistant\n"
        options = ("-n", "8", "--json")
        asked = json.loads(generated(model, "-p", "What does os.path.join do?", "--chat", *options))
        plain = json.loads(generated(model, "-p", wrapped, *options))
        assert asked["prompt_tokens"] >= plain["prompt_tokens"]
        assert asked["text"]

    @pytest.mark.thorough
    def test_grammars(self, model: Path, tmp_path: Path) -> None:
        grammar = tmp_path / "yes.gbnf"
        grammar.write_text('root ::= "yes" | "no"\n')
        assert generated(model, "-p", "x", "--grammar-file", grammar).strip() in ("yes", "no")
        schema = '{"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}'
        text = generated(model, "-p", "x = ", "-n", "60", "--json-schema", schema)
        assert json.loads(text) == {"a": "b"}
        grammar.write_text("root ::= (\n")
        done = invoke("generate", model, "-p", "x", "-t", "1", "--grammar-file", grammar)
        assert done.exit_code == 1
        assert "mtp-gguf: --grammar-file: llama.cpp cannot read the grammar" in done.stderr

    @pytest.mark.thorough
    def test_sampling_options(self, model: Path) -> None:
        base = ("-p", "def f", "-n", "12", "--temp", "5")
        greedy = generated(model, "-p", "def f", "-n", "12")
        assert generated(model, *base, "--top-k", "1") == greedy
        assert generated(model, *base, "--min-p", "1") == greedy
        assert generated(model, *base, "--top-p", "0") == greedy
        texts = {
            generated(model, *base, "--top-k", "0", "--min-p", "0", "--top-p", "1", "--seed", "-1")
            for _ in range(3)
        }
        assert len(texts) > 1

    def test_stats_name_device_and_libraries(self, model: Path) -> None:
        done = invoke("generate", model, "-p", "x", "-n", "4", "--depth", "0", "--stats", "-t", "1")
        assert "no drafts made\n" in done.stderr
        assert "runs on: CPU, " in done.stderr
        assert "llama-cpp-python 0.3" in done.stderr

    def test_no_gpu_is_said_once(self, model: Path) -> None:
        done = invoke("generate", model, "-p", "x", "-n", "2", "-ngl", "99", "-t", "1")
        assert done.exit_code == 0
        assert done.stderr.count("-ngl 99: llama.cpp found no GPU") == 1

    @pytest.mark.parametrize(
        ("layers", "note"),
        [(0, "--n-cpu-moe: has no effect, because the model has no experts"), (9, "-ngl 9: ")],
    )
    def test_experts_of_a_dense_model(self, model: Path, layers: int, note: str) -> None:
        words = ("-p", "x", "-n", "2", "-ngl", layers, "--n-cpu-moe", "3", "-t", "1")
        done = invoke("generate", model, *words)
        assert done.exit_code == 0
        assert done.stderr.startswith(f"mtp-gguf: {note}")
        assert done.stderr.count("\n") == 1

    def test_several_gpus_where_there_is_none(self, model: Path) -> None:
        words = ("-p", "x", "-n", "2", "-t", "1", "-sm", "layer", "-ts", "3,1", "-mg", "0")
        done = invoke("generate", model, *words, "-ngl", "9")
        assert done.exit_code == 0
        assert done.stderr.startswith("mtp-gguf: -ngl 9: llama.cpp found no GPU")
        assert invoke("generate", model, *words).exit_code == 0

    @pytest.mark.parametrize("command", ["generate", "chat", "serve"])
    def test_shares_of_gpus_are_checked(self, model: Path, command: str) -> None:
        for text in ("a", "1,", "0,0", "1,-1", "nan"):
            done = invoke(command, model, "--tensor-split", text)
            assert done.exit_code == 2
            assert (
                f"expected numbers such as 3,1, of which one is not 0, found '{text}'"
                in " ".join(done.stderr.replace("│", " ").split())
            )


class TestCompletion:
    """What a shell offers after a word, as the installed completion asks for it."""

    @pytest.mark.sample(2)
    @pytest.mark.parametrize(
        ("line", "offered"),
        [
            ("mtp-gguf do", "doctor"),
            ("mtp-gguf convert --quant Q5_K", "Q5_K_M"),
            ("mtp-gguf convert --mtp-type BF", "BF16"),
            ("mtp-gguf generate --rollback check", "checkpoint"),
            ("mtp-gguf convert --fastmtp-layout si", "sidecar"),
            ("mtp-gguf fastmtp ca", "calibrate"),
        ],
    )
    def test_of_commands_and_values(self, line: str, offered: str) -> None:
        words = line.split()
        environment = {
            **os.environ,
            "_MTP_GGUF_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(words) - 1),
        }
        assert offered in run_python(MAIN, env=environment).split()


class TestDemo:
    def test_its_prompt_as_a_shell_reads_it(self) -> None:
        shown = subprocess.run(
            ["bash", "-c", f"printf %s {shell_word(PROMPT)}"], capture_output=True, check=True
        )
        assert shown.stdout.decode() == PROMPT

    def test_names_no_file_that_is_gone(self) -> None:
        done = invoke("demo", "-n", "2")
        assert done.exit_code == 0, done.output
        last = done.stdout.splitlines()[-1]
        assert "removed" in last
        assert "mtp-gguf demo -o demo.gguf" in last
        assert "next: mtp-gguf list-tensors demo.gguf --mtp\n" in done.stdout


def test_one_shape_of_head(model: Path, tmp_path: Path) -> None:
    """What list-tensors, strip, extract and graft say of a head has the same fields."""
    trunk, whole = tmp_path / "trunk.gguf", tmp_path / "whole.gguf"
    said = [
        json.loads(invoke("list-tensors", model, "--json").stdout),
        json.loads(invoke("strip", model, "-o", trunk, "--json").stdout),
        json.loads(invoke("extract", model, "-o", tmp_path / "head.gguf", "--json").stdout),
    ]
    grafted = invoke("graft", trunk, "--from", model, "-o", whole, "--no-check", "--json")
    said.append(json.loads(grafted.stdout))
    assert len({tuple(each["head"]) for each in said}) == 1
    assert [each["head"]["ready"] for each in said] == [True, False, True, True]
