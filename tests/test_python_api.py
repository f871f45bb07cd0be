"""`mtp_gguf.convert` and its like: the commands' options, from Python."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import mtp_gguf
from mtp_gguf.cli.convert import convert as convert_command
from mtp_gguf.cli.graft import graft as graft_command
from mtp_gguf.cli.train_head import train_head as train_head_command
from mtp_gguf.convert.api import Converted, convert
from mtp_gguf.convert.heads.graft import graft
from mtp_gguf.gguf_tools.errors import MtpGgufError, OptionError, RequestError
from mtp_gguf.gguf_tools.progress import Progress
from mtp_gguf.train.api import train_head
from support.commands import invoke, run_python, succeed
from support.models import Models

OF_THE_CONSOLE = {"as_json", "verbose"}  # options of what a command prints


@pytest.mark.parametrize(
    ("function", "command"),
    [(convert, convert_command), (graft, graft_command), (train_head, train_head_command)],
)
def test_the_options_are_the_commands(
    function: Callable[..., Any], command: Callable[..., Any]
) -> None:
    """Each option of the command is an argument, with the same default but for empty lists."""
    options = inspect.signature(command).parameters
    arguments = inspect.signature(function).parameters
    assert options.keys() - OF_THE_CONSOLE == arguments.keys() - {"progress", "on_plan"}
    for name in options.keys() - OF_THE_CONSOLE:
        assert (arguments[name].default or None) == (options[name].default or None), name


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (convert, ("convert", "model")),
        (graft, ("graft", "model", "--from", "donor")),
        (train_head, ("train-head", "model", "--text", "file")),
    ],
)
def test_the_commands_pass_every_option(
    function: Callable[..., Any], words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = inspect.signature(function)
    passed: set[str] = set()

    def record(*args: Any, **options: Any) -> None:
        passed.update(signature.bind(*args, **options).arguments)
        raise RequestError("nothing is done")

    monkeypatch.setattr(f"{function.__module__}.{function.__name__}", record)
    assert "nothing is done" in invoke(*words).stderr
    assert passed == signature.parameters.keys()


def test_nothing_heavy_is_imported_before_a_call() -> None:
    run_python(
        "import sys, mtp_gguf, mtp_gguf.convert\n"
        "assert callable(mtp_gguf.convert)\n"
        "assert not {'numpy', 'gguf', 'torch', 'typer', 'llama_cpp'} & sys.modules.keys()"
    )


def test_the_package_is_the_function() -> None:
    """In any order of imports."""
    for program in (
        "import mtp_gguf.convert; from mtp_gguf.convert import api; "
        "from mtp_gguf.convert.plans import plan; import mtp_gguf",
        "from mtp_gguf import convert; import mtp_gguf.convert.plans.plan; import mtp_gguf",
        "import mtp_gguf; mtp_gguf.convert; mtp_gguf.train_head; "
        "from mtp_gguf.convert.plans import plan",
    ):
        check = "import types; assert isinstance(mtp_gguf.convert, types.ModuleType)"
        functions = "mtp_gguf.convert, mtp_gguf.graft, mtp_gguf.train_head"
        run_python(f"{program}; {check}; assert all(map(callable, ({functions})))")


class TestConvert:
    @pytest.mark.parametrize(
        ("options", "arguments"),
        [
            ((), {}),
            (("--mtp-f16", "--fastmtp", 300), {"mtp_f16": True, "fastmtp": 300}),
            (("--fastmtp",), {"fastmtp": True}),
            (
                ("--quant", "Q5_K_M", "--also", "Q8_0,F16", "--tensor-type", "attn_v=Q6_K"),
                {"quant": "Q5_K_M", "also": ["Q8_0", "F16"], "tensor_type": "attn_v=Q6_K"},
            ),
            (("--no-mtp", "--split-max-size", "1M"), {"no_mtp": True, "split_max_size": 10**6}),
            (
                ("--fastmtp", 300, "--fastmtp-layout", "sidecar"),
                {"fastmtp": 300, "fastmtp_layout": "sidecar"},
            ),
        ],
    )
    def test_the_files_are_the_commands(
        self, options: tuple[object, ...], arguments: dict[str, Any], models: Models, tmp_path: Path
    ) -> None:
        model = models.checkpoint("dense-3v")
        ours, theirs = tmp_path / "ours", tmp_path / "theirs"
        ours.mkdir()
        theirs.mkdir()
        made = mtp_gguf.convert(model, ours, **arguments)
        succeed("convert", model, "-o", theirs, *options)
        assert sorted(p.name for p in made.paths) == sorted(p.name for p in theirs.iterdir())
        for path, size in made.sizes.items():
            assert path.read_bytes() == (theirs / path.name).read_bytes()
            assert path.stat().st_size == size
        assert made.outcome is not None
        mixes = [arguments.get("quant", "Q4_K_M"), *arguments.get("also", ())]
        assert [plan.quant for plan in made.plans] == mixes

    def test_a_gguf(self, models: Models, tmp_path: Path) -> None:
        source = models.gguf("dense-3v", "F16", "F16")
        made = mtp_gguf.convert(source, tmp_path / "a.gguf", quant="Q8_0", fastmtp=300)
        succeed("convert", source, "-o", tmp_path / "b.gguf", "--quant", "Q8_0", "--fastmtp", 300)
        assert made.paths == (tmp_path / "a.gguf",)
        assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()

    def test_a_dry_run(self, models: Models, tmp_path: Path) -> None:
        planned: list[Converted] = []
        options: dict[str, Any] = {"dry_run": True, "on_plan": planned.append}
        made = mtp_gguf.convert(models.checkpoint("dense-3v"), tmp_path / "x.gguf", **options)
        assert planned == [made]
        assert made.outcome is None
        assert not list(tmp_path.iterdir())
        arguments = ("-o", tmp_path / "x.gguf", "--dry-run", "--json")
        told = json.loads(succeed("convert", models.checkpoint("dense-3v"), *arguments))
        assert [told["files"][0]["bytes"]] == [*made.sizes.values()]

    @pytest.mark.parametrize(
        ("options", "arguments"),
        [
            (("--quant", "Q4_L"), {"quant": "Q4_L"}),
            (("--also", "Q4_K_M"), {"also": "Q4_K_M"}),
            (("--mtp-f16", "--mtp-type", "Q8_0"), {"mtp_f16": True, "mtp_type": "Q8_0"}),
            (("--mtp-type", "Q9"), {"mtp_type": "Q9"}),
            (("--no-mtp", "--fastmtp"), {"no_mtp": True, "fastmtp": True}),
            (("--fastmtp", 0), {"fastmtp": 0}),
            (("--fastmtp-layout", "table"), {"fastmtp_layout": "table"}),
            (("--mmproj-only", "--no-mtp"), {"mmproj_only": True, "no_mtp": True}),
            (("--mmproj=Q4_K",), {"mmproj": "Q4_K"}),
            (("--tensor-type", "x"), {"tensor_type": ["x"]}),
            (("--revision", "main"), {"revision": "main"}),
            (("--stream",), {"stream": True}),
            (("--target-bpw", 4, "--target-kld", 0.1), {"target_bpw": 4, "target_kld": 0.1}),
            (("-o", "x.safetensors"), {"output": "x.safetensors"}),
            (("-o", "-"), {"output": "-"}),
        ],
    )
    def test_contradictions_have_the_commands_sentence(
        self,
        options: tuple[object, ...],
        arguments: dict[str, Any],
        models: Models,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        model = models.checkpoint("dense-3v")
        with pytest.raises(OptionError) as error:
            mtp_gguf.convert(model, **arguments)
        result = invoke("convert", model, *options, "--json")
        assert result.exit_code == 2
        told = json.loads(result.stdout)["error"]
        assert told.endswith(error.value.text)
        assert error.value.option is None or error.value.option in told
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "arguments",
        [
            {"threads": 0},
            {"target_bpw": 0.5},
            {"target_kld": 0.0},
            {"target_size": 0},
            {"split_max_size": -1},
            {"fastmtp_layout": "rows", "fastmtp": True},
        ],
    )
    def test_values_that_the_commands_parser_rejects(
        self, arguments: dict[str, Any], models: Models, tmp_path: Path
    ) -> None:
        with pytest.raises(OptionError, match=r"^--[a-z-]+: expected ") as error:
            mtp_gguf.convert(models.checkpoint("dense-3v"), tmp_path, **arguments)
        assert error.value.option == "--" + next(iter(arguments)).replace("_", "-")
        assert not list(tmp_path.iterdir())

    def test_other_errors(self, tmp_path: Path) -> None:
        with pytest.raises(MtpGgufError, match="nothing") as error:
            mtp_gguf.convert(tmp_path / "nothing", tmp_path / "x.gguf")
        assert not isinstance(error.value, OptionError)

    def test_progress(
        self, models: Models, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        counted: dict[str, list[int]] = {}

        class Counts(Progress):
            @contextmanager
            def count(
                self, title: str, total: int, note: Callable[[], str] = lambda: ""
            ) -> Iterator[Callable[[int], None]]:
                counts = counted[f"{title} {total}"] = []
                yield counts.append

        output = tmp_path / "x.gguf"
        made = mtp_gguf.convert(models.checkpoint("dense-3v"), output, progress=Counts())
        [(title, counts)] = counted.items()
        assert title == f"convert {made.sizes[output]}"
        assert 0.9 * made.sizes[output] < sum(counts) <= made.sizes[output]
        mtp_gguf.convert(models.checkpoint("dense-3v"), output, overwrite=True)
        assert capfd.readouterr() == ("", "")  # nothing is printed


class TestGraft:
    @pytest.fixture
    def base(self, models: Models) -> Path:
        return models.convert("dense-3v", "--no-mtp")

    @pytest.mark.thorough
    @pytest.mark.parametrize(
        ("options", "arguments"),
        [((), {}), (("--mtp-f16", "--fastmtp", 300), {"mtp_f16": True, "fastmtp": 300})],
    )
    def test_the_file_is_the_commands(
        self,
        options: tuple[object, ...],
        arguments: dict[str, Any],
        base: Path,
        models: Models,
        tmp_path: Path,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        source = models.checkpoint("dense-3v")
        ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
        made = mtp_gguf.graft(base, source, ours, no_check=True, **arguments)
        assert capfd.readouterr() == ("", "")
        succeed("graft", base, "--from", source, "-o", theirs, "--no-check", *options)
        assert made.path == ours
        assert made.acceptance is None
        assert made.compared is None
        assert ours.read_bytes() == theirs.read_bytes()

    @pytest.mark.thorough
    def test_a_head_of_a_gguf_is_measured(
        self,
        models: Models,
        tmp_path: Path,
        capfd: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setenv("MTP_GGUF_ACCEPTANCE", "1")
        base, donor = models.convert("demo", "--no-mtp"), models.gguf("demo", "Q4_K_M", "F16")
        made = mtp_gguf.graft(base, donor, tmp_path, fastmtp=300)
        assert capfd.readouterr() == ("", "")
        assert made.path.parent == tmp_path
        assert made.compared is not None
        assert made.acceptance is not None
        assert made.acceptance.measured is not None
        options = ("-o", tmp_path / "theirs.gguf", "--fastmtp", 300, "--json")
        told = json.loads(succeed("graft", base, "--from", donor, *options))
        assert made.acceptance.fields()["accepted"] == told["acceptance"]["accepted"]
        assert made.compared.fields() == told["compared"]
        assert made.path.read_bytes() == (tmp_path / "theirs.gguf").read_bytes()

    def test_contradictions_have_the_commands_sentence(
        self, base: Path, models: Models, tmp_path: Path
    ) -> None:
        donor, output = models.gguf("dense-3v", "Q4_K_M", "F16"), tmp_path / "x.gguf"
        with pytest.raises(OptionError, match="a GGUF's head is copied as it is") as error:
            mtp_gguf.graft(base, donor, output, mtp_type="Q8_0")
        command = ("graft", base, "--from", donor, "-o", output, "--mtp-type", "Q8_0", "--json")
        assert json.loads(invoke(*command).stdout)["error"].endswith(error.value.text)
        with pytest.raises(OptionError, match="contradict each other"):
            mtp_gguf.graft(base, donor, output, fastmtp_ids="a", fastmtp_corpus="b")
        with pytest.raises(MtpGgufError, match="has an MTP head in block"):
            mtp_gguf.graft(donor, donor, output)
        assert not list(tmp_path.iterdir())


class TestTrainHead:
    FAST: ClassVar[dict[str, Any]] = {
        "tokens": 700,
        "length": 64,
        "epochs": 1,
        "steps": 2,
        "threads": 1,
    }

    @pytest.fixture
    def text(self, tmp_path: Path) -> Path:
        path = tmp_path / "code.py"
        path.write_text(inspect.getsource(inspect), encoding="utf-8")
        return path

    @pytest.mark.thorough
    def test_the_file_is_the_commands(
        self, text: Path, models: Models, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        model = models.gguf("demo", "Q4_K_M", "F16")
        ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
        threads = torch.get_num_threads()
        made = mtp_gguf.train_head(model, ours, text=text, fastmtp=300, **self.FAST)
        assert capfd.readouterr() == ("", "")
        assert torch.get_num_threads() == threads
        fast = [word for name, value in self.FAST.items() for word in (f"--{name}", value)]
        options = ("--text", text, "--fastmtp", 300, *fast, "--json")
        told = json.loads(invoke("train-head", model, "-o", theirs, *options).stdout)
        assert made.path == ours
        assert made.kept is None
        found = json.loads(json.dumps(made.figures["acceptance"]))
        for evaluation in (*found["history"], *told["acceptance"]["history"]):
            assert evaluation.pop("seconds") >= 0
        assert found == told["acceptance"]
        assert [*made.warnings] == told["warnings"]
        assert ours.read_bytes() == theirs.read_bytes()

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({}, "expected --text, --prompt-file or both"),
            ({"text": "a", "from_scratch": True, "head_from": "b"}, "contradict each other"),
            ({"text": "a", "output": "x.safetensors", "head_only": True}, "do not apply"),
            ({"text": "a", "steps": 9}, "--steps: expected 1 to 8, found 9"),
            ({"text": "a", "tokens": 1}, "--tokens: expected at least 256, found 1"),
            ({"text": "a", "seed": -1}, "--seed: expected 0 to 2147483647, found -1"),
            ({"text": "a", "minutes": 0}, "--minutes: expected at least 0.01, found 0"),
        ],
    )
    def test_contradictions(
        self, arguments: dict[str, Any], words: str, models: Models, tmp_path: Path
    ) -> None:
        arguments = {"output": tmp_path / "x.gguf"} | arguments
        with pytest.raises(OptionError, match=words):
            mtp_gguf.train_head(models.gguf("demo", "Q4_K_M", "F16"), **arguments)
        assert not list(tmp_path.iterdir())

    def test_other_errors(self, models: Models, tmp_path: Path) -> None:
        with pytest.raises(MtpGgufError, match="cannot be read") as error:
            mtp_gguf.train_head(models.gguf("demo"), tmp_path / "x.gguf", text=tmp_path / "none")
        assert not isinstance(error.value, OptionError)
