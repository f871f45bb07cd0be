"""`mtp-gguf generate`: its options, its result and its end, in a pipe and on a terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from mtp_gguf.cli import generate
from mtp_gguf.cli.drafting_model import drafting_model
from mtp_gguf.cli.stop_strings import StopStrings
from support.commands import MAIN, check_refusal, invoke, spawn
from support.models import Models
from support.terminals import on_a_terminal

PROMPT = "def is_prime(n):\n"
WIDTH = 256  # of the demo model
# Sends the process the signal of its third argument with the fifth piece of text.
INTERRUPT = """
import itertools, os, signal
from mtp_gguf.cli.token_colors import TokenText
add, count = TokenText.add, itertools.count(1)
def interrupted(*arguments):
    if next(count) == 5:
        os.kill(os.getpid(), signal.SIGNAL)
    return add(*arguments)
TokenText.add = interrupted
"""


@pytest.fixture(scope="module")
def demo(models: Models) -> Path:
    return models.convert("demo", "--mtp-f16")


def answer(model: Path, *options: object, prompt: str = PROMPT) -> dict[str, Any]:
    """What `generate --json` prints."""
    words = ("-p", prompt, "-t", "1", "--ctx", "512", "--json")
    done = invoke("generate", model, *words, *options)
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout)
    return result


class TestStopStrings:
    @pytest.mark.parametrize(
        ("stops", "pieces", "text"),
        [
            (["END"], ["a", "b END c", "d"], "ab "),
            (["END"], ["a E", "N", "D", "b"], "a "),
            (["END"], ["a E", "N", " D"], "a EN D"),
            (["aab"], ["aa", "ab"], "a"),
            (["xy", "b"], ["a", "bxy"], "a"),
            (["\n\n"], ["a\n", "b\n"], "a\nb\n"),
            ([], ["a", "b"], "ab"),
        ],
    )
    def test_the_text_ends_before_the_first(
        self, stops: list[str], pieces: list[str], text: str
    ) -> None:
        filtered = StopStrings(stops)
        shown = [part for piece in pieces for part in filtered.add(piece, 0)]
        found = any(stop in "".join(pieces) for stop in stops)
        assert filtered.found is found
        assert "".join(part for part, _ in [*shown, *filtered.end()]) == text

    def test_each_part_keeps_its_origin(self) -> None:
        filtered = StopStrings(["END"])
        assert filtered.add("a E", 1) == [("a ", 1)]
        assert filtered.add("N ", 2) == [("E", 1), ("N ", 2)]


class TestResult:
    def test_prompt_and_generated_tokens_are_counted(self, demo: Path) -> None:
        found = answer(demo, "-n", "7", "--depth", "3")
        assert found["completion_tokens"] == 7
        assert found["prompt_tokens"] == found["prefilled"]
        assert found["finish_reason"] == "length"

    def test_the_end_of_the_text(self, demo: Path) -> None:
        found = answer(demo, "-n", "400")
        assert found["completion_tokens"] < 400
        assert found["finish_reason"] == "stop"

    def test_a_full_context(self, demo: Path) -> None:
        found = answer(demo, "-n", "-1", "--ctx", "256", prompt="1 1 1 1 1 1")
        assert found["prompt_tokens"] + found["completion_tokens"] == 256
        assert found["finish_reason"] == "length"

    def test_no_token(self, demo: Path, tmp_path: Path) -> None:
        """0 is a number of tokens: the prompt is read, and a session has it."""
        kept = str(tmp_path / "a.session")
        found = answer(demo, "-n", "0", "--session", kept)
        assert (found["text"], found["completion_tokens"]) == ("", 0)
        assert found["finish_reason"] == "length"
        whole = answer(demo, "-n", "8")["text"]
        assert whole
        assert answer(demo, "-n", "8", "--session", kept, prompt="")["text"] == whole

    def test_a_context_that_is_rounded_up(self, demo: Path) -> None:
        done = invoke("generate", demo, "-p", "x", "-n", "2", "-t", "1", "--ctx", "16")
        assert "mtp-gguf: --ctx 16: llama.cpp rounds it up to 256\n" in done.stderr
        assert "rounds" not in invoke("generate", demo, "-p", "x", "-n", "2", "-t", "1").stderr

    @pytest.mark.sample(1)
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_an_interrupted_one_prints_what_it_has(
        self, number: signal.Signals, demo: Path
    ) -> None:
        words = ("generate", demo, "-p", PROMPT, "-t", "1", "--ctx", "512", "--depth", "0")
        prelude = INTERRUPT.replace("SIGNAL", number.name)
        whole = answer(demo, "--depth", "0")["text"]
        with spawn(*words, "--json", prelude=prelude) as process:
            out, err = process.communicate(timeout=60)
        found = json.loads(out)
        assert found["finish_reason"] == "interrupted"
        assert whole.startswith(found["text"])
        assert found["text"]
        assert found["completion_tokens"] == 5
        assert (found["error"], found["exit_code"]) == ("interrupted", 128 + number)
        assert (process.returncode, err) == (128 + number, "mtp-gguf: interrupted\n")

        with spawn(*words, "--stats", prelude=prelude) as process:
            out, err = process.communicate(timeout=60)
        assert whole.startswith(out.removesuffix("\n"))
        assert err.startswith("5 tokens in ")
        assert "\nruns on: CPU" in err
        assert err.endswith("\nmtp-gguf: interrupted\n")
        assert process.returncode == 128 + number


class TestOptions:
    @pytest.mark.parametrize("option", ["--stop", "-r", "--reverse-prompt"])
    def test_stop(self, option: str, demo: Path) -> None:
        whole = answer(demo)["text"]
        found = answer(demo, option, "return", option, "never in it")
        assert found["text"] == whole[: whole.index("return")]
        assert found["finish_reason"] == "stop"
        assert "return" in whole[len(found["text"]) :]

    def test_an_empty_stop_string(self, demo: Path) -> None:
        done = invoke("generate", demo, "-p", "x", "--stop", "")
        check_refusal(done.exit_code, done.stderr, "--stop", "found an empty one", code=2)

    @pytest.mark.parametrize("option", ["--system", "-sys", "--system-prompt"])
    def test_system(self, option: str, demo: Path) -> None:
        prompt = (
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is len?<|im_end|>\n"
            "<|im_start|>assistant\n"
        )
        spelled_out = answer(demo, "-n", "12", prompt=prompt)
        found = answer(demo, "-n", "12", option, "Be brief.", prompt="What is len?")
        assert found["text"] == spelled_out["text"]
        assert found["prompt_tokens"] == spelled_out["prompt_tokens"]

    @pytest.mark.parametrize("option", ["--presence-penalty", "--frequency-penalty"])
    def test_penalties(self, option: str, demo: Path) -> None:
        """The demo model repeats one token for ever; with a penalty others come."""
        prompt = "1 1 1 1 1 1"
        repeated = answer(demo, "-n", "20", prompt=prompt)["text"]
        assert len(set(repeated)) == 1
        assert answer(demo, "-n", "20", option, "0", prompt=prompt)["text"] == repeated
        assert set(answer(demo, "-n", "20", option, "20", prompt=prompt)["text"]) - set(repeated)

    def test_an_adapter(self, demo: Path, tmp_path: Path) -> None:
        """One that adds nothing changes nothing; another one changes the text."""
        plain = answer(demo, "-n", "24")["text"]
        for scale, same in ((0.0, True), (3.0, False)):
            adapter = write_adapter(tmp_path / f"{scale}.gguf", scale)
            assert (answer(demo, "-n", "24", "--lora", adapter)["text"] == plain) is same

    def test_a_missing_adapter(self, demo: Path, tmp_path: Path) -> None:
        done = invoke("generate", demo, "-p", "x", "--lora", tmp_path / "none.gguf")
        check_refusal(done.exit_code, done.stderr, "--lora: expected", "none.gguf")

    @pytest.mark.parametrize(
        ("options", "types"),
        [
            ((), (1, 1)),
            (("--cache-type-k", "q8_0"), (8, 1)),
            (("-ctk", "q8_0", "-ctv", "q4_0"), (8, 2)),
            (("--cache-type-v", "iq4_nl"), (1, 20)),
        ],
    )
    def test_types_of_the_cache(
        self,
        options: tuple[str, ...],
        types: tuple[int, int],
        demo: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        loaded: list[Any] = []

        def load(*arguments: Any, **options: Any) -> Any:
            loaded.append(drafting_model(*arguments, **options))
            return loaded[-1]

        monkeypatch.setattr(generate, "drafting_model", load)
        assert answer(demo, "-n", "8", *options)["completion_tokens"] == 8
        params = loaded[0].context_params
        assert (params.type_k, params.type_v) == types

    @pytest.mark.parametrize("option", ["--max-tokens", "--n-predict", "--tokens"])
    def test_max_tokens(self, option: str, demo: Path) -> None:
        assert answer(demo, option, "3")["completion_tokens"] == 3


def write_adapter(path: Path, scale: float) -> Path:
    """A LoRA adapter for the demo model's first feed-forward layer, as llama.cpp reads it."""
    name, rank, inner = "blk.0.ffn_down.weight", 4, 768
    rng = np.random.default_rng(0)
    a = rng.standard_normal((rank, inner)).astype(np.float32)
    b = np.float32(scale) * rng.standard_normal((WIDTH, rank)).astype(np.float32)
    writer = GGUFWriter(path, "qwen35")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(rank))
    writer.add_tensor(f"{name}.lora_a", a)
    writer.add_tensor(f"{name}.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", ""], "--prompt: expected 1 to 255 tokens, found 0"),
        (["-p", "a b " * 400], "expected 1 to 255 tokens, found .*; shorten it, or raise --ctx"),
        (["-p", "a", "--ctx", "-5"], "--ctx.*: Input should be greater"),
        (["-p", "a", "--ctx", "99999999999"], "--ctx.*: Input should be less"),
        (["-p", "a", "--temp", "-1"], "--temp.*: Input should be greater"),
        (["-p", "a", "--temp", "nan"], "--temp.*: Input should be"),
        (["-p", "a", "--depth", "autos"], "expected 0 to 16 or auto, found 'autos'"),
    ],
)
def test_invalid_arguments(dial: Any, arguments: list[str], message: str) -> None:
    done = invoke("generate", dial("tiny", hit=0.9), "-c", "256", "-t", "1", *arguments)
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit)
    said = " ".join(done.stderr.replace("│", " ").split())
    assert re.search(message, said)
    assert not done.stdout


@pytest.mark.parametrize("environment", [{"TERM": "xterm"}, {"TERM": "xterm", "NO_COLOR": "1"}])
def test_the_terminal_shows_who_wrote_what(dial: Any, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", MAIN]
    command += ["generate", str(dial("tiny", hit=1.0)), "-p", "def f", "-n", "30", "-t", "1"]
    command += ["-c", "256", "--depth", "2"]
    ours = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    seen = on_a_terminal(command, env=ours | environment)
    assert ("\x1b[4;38;5;" in seen) == ("NO_COLOR" not in environment)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", seen).splitlines()
    at = lines.index("source      tokens  accepted")
    assert [line.split() for line in lines[at + 1 :]] == [
        *(["trunk", "10"], ["draft", "1", "10", "100%"], ["draft", "2", "10", "100%"]),
    ]
    assert max(map(len, lines[at:])) <= 40
