"""The documentation says what the code does: made pages, commands, tables and links."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from mtp_gguf.cli import app
from mtp_gguf.cli.bench_table import bench_table
from mtp_gguf.server.patches import read_patches
from mtp_gguf.server.upstream_source import base_names, llama_cpp_source
from support import bench_records as records
from support.commands import invoke
from support.models import ROOT
from support.pages import BLOCK, DOCS, PAGES, blocks, fits, repository, shown, words_of


def test_tensors_page_is_the_codes() -> None:
    made = subprocess.run(
        [sys.executable, DOCS / "make_tensors.py"], capture_output=True, text=True, check=True
    )
    assert made.stdout == (DOCS / "tensors.md").read_text(encoding="utf-8")


CLI = sorted((ROOT / "cli").glob("*.py"))


def commands(page: Path) -> Iterator[str]:
    """Every command line of ours in a page: in its code blocks, and in its text if it has words.

    In the help of a command it is a line of its own.
    """
    text = shown(page)
    lines = re.findall(r"^mtp-gguf .*", text, re.MULTILINE) if page in CLI else []
    for _, code in BLOCK.findall(text):
        typed = re.findall(r"^\$ .*", code, re.MULTILINE)  # the rest of a transcript is output
        lines += typed or code.splitlines()
    lines += re.findall(r"(?<!`)`([^`\n]*mtp-gguf [^`\n]*)`(?!`)", BLOCK.sub("", text))
    for line in lines:
        for part in re.split(r"&&|[|>](?=\s)|;\s", line.partition(" #")[0]):
            words = part.removeprefix("$ ").strip()
            if match := re.match(r"(?:[A-Z_]+=(?:\"[^\"]*\"|\S*) )*mtp-gguf +(?=\S)", words):
                yield words[match.end() :]


def parses(words: list[str]) -> str | None:
    """Why the command line does not accept these words; None if it does. Nothing is run."""
    group: Any = typer.main.get_command(app)
    context = typer.Context(group)
    try:
        while words and hasattr(group, "list_commands"):
            name, group, words = group.resolve_command(context, words)
        group.make_context(name, [*words], resilient_parsing=False)
    except typer.Exit:
        return None  # --help
    except Exception as error:  # the parser's own, of several kinds
        return getattr(error, "message", str(error))
    return None


@pytest.mark.parametrize("page", [*PAGES, *CLI], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_is_accepted(page: Path) -> None:
    """Names of commands and options exist, values are possible, and nothing is left out."""
    wrong = {}
    for line in commands(page):
        if re.search(r"…|\.\.\.|\[|<", line):  # a synopsis
            continue
        one_list = re.sub(r"( \S*\*\S*)+", r"\1", line)  # several are a list if the files exist
        if reason := parses(words_of(one_list)):
            wrong[line] = reason
    assert not wrong


def test_commands_are_found() -> None:
    found = [*commands(ROOT / "README.md")]
    assert "generate demo.gguf -p $'def is_prime(n):\\n' -n 96 --ctx 512 --depth 3 --stats" in found
    assert "serve OWNER/NAME:Q4_K_M" in found
    assert len(found) > 20
    assert "No such option" in str(parses(["convert", "x", "--no-such"]))
    assert "No such command" in str(parses(["converts", "x"]))


class TestReadme:
    def test_the_demo_runs_these_commands(self, tmp_path: Path) -> None:
        """`mtp-gguf demo` prints the commands of the first transcript, word for word."""
        printed = invoke("demo", "-o", tmp_path / "demo.gguf").output
        [first, *_] = [code for code in blocks(ROOT / "README.md", "") if code.startswith("$ ")]
        shown = [line for line in first.splitlines() if line.startswith("$ mtp-gguf ")]
        assert len(shown) == 2
        assert {*shown} <= {*printed.splitlines()}


def test_measured_tables_have_the_columns_of_today() -> None:
    """docs/bench.md shows figures that were measured once, under what `bench` prints now."""
    result = records.result()
    texts = tuple(text for text in result.texts if text.depth != "auto")  # it has no kinds
    printed = {line.rstrip() for line in bench_table(replace(result, texts=texts))}
    shown = "\n".join(blocks(DOCS / "bench.md", "")).splitlines()
    headings = [line for line in shown if "±" in line or line.startswith("llama-server, ")]
    assert len(headings) == 3
    assert {*headings} <= printed


def test_what_fits() -> None:
    assert fits("a\n…\nd", "a\nb\nc\nd")
    assert fits("a\n…", "a\nb")
    assert fits("cycles: 27, 3.52 tokens each", "cycles: 28, 3.41 tokens each")
    assert not fits("a\n…\nc", "a\nb")
    assert not fits("a", "a\nb")


def test_links_lead_somewhere() -> None:
    """Links to files and to headings of other pages."""
    broken = []
    for page in PAGES:
        text = BLOCK.sub("", page.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"https?:|mailto:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert not broken


def texts() -> list[Path]:
    """Python, C++ and pages, but no tests and no dated pages."""
    kinds, left_out = re.compile(r"\.(cpp|h|md|py)$"), ("tests/", "benchmarks/results/")
    names = (name for name in repository() if not name.startswith(left_out))
    return [ROOT / name for name in names if kinds.search(name)]


def lines_of(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """The lines of files, each with the place where it is."""
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{path.relative_to(ROOT)}:{number}", line


def test_patches_exist() -> None:
    """Every number like 0101 is that of a patch, if not always of the one that is meant."""
    numbers = {patch.name[:4] for patch in read_patches()}
    found = [
        (place, number)
        for place, line in lines_of(texts())
        for number in re.findall(r"(?<![\w.,/-])0[01]\d\d(?![\w.])", line)
    ]
    assert len(found) > 50
    assert not [one for one in found if one[1] not in numbers]


def test_files_and_tests_exist() -> None:
    """Those that are named from the root of the repository, and functions of tests."""
    files = repository()
    known = {*files, *(str(parent) for name in files for parent in Path(name).parents)}
    rooms = {name.partition("/")[0] for name in files if "/" in name}
    rooms -= {"src"}  # of llama.cpp
    path = re.compile(rf"(?<![\w./~-])((?:{'|'.join(map(re.escape, rooms))})/[\w./-]*\w)")
    tests = {Path(name).stem for name in files}
    for name in files:
        if re.match(r"tests/.*\.py$", name):
            tests |= {*re.findall(r"def (test_\w+)", (ROOT / name).read_text(encoding="utf-8"))}
    found = []
    for place, line in lines_of(texts()):
        for name in path.findall(line):
            beginning = re.match(r"(patches/(upstream/)?\d{4}|tests/goldens/\w+)$", name)
            there = any(file.startswith(name) for file in files) if beginning else name in known
            found.append((f"{place}: {name}", there or name.startswith(MADE)))
        found += [(f"{place}: {name}", name in tests) for name in re.findall(r"\btest_\w+", line)]
    assert len(found) > 500
    assert not [name for name, exists in found if not exists]


# Beginnings of names that look like those of files here: in a cache, in the installed package.
MADE = ("server/0.3.36", "native/lib/")
# Options of other programs; those of llama.cpp's common code are looked up there.
OTHERS = {
    "cmake": "--build --target",
    "convert_hf_to_gguf.py": "--fuse-gate-up-exps --fuse-qkv",
    "dask": "--local-directory --nthreads --nworkers",
    "docker": "--build-arg --isolation --rm",
    "docs/make_tensors.py": "--write",
    "git": "--amend --autosquash --fixup",
    "llama-gguf-split": "--split",
    "lm_eval": "--batch_size --model_args --tasks",
    "pip": "--find-links --force-reinstall --no-binary --no-build-isolation --no-cache-dir",
    "pip install": "--no-deps --no-index",
}


def known_options() -> set[str]:
    """The options of our commands and scripts, and of llama.cpp with the patches."""
    found = {"--help"}
    groups: list[Any] = [typer.main.get_command(app)]
    for group in groups:
        context = typer.Context(group)
        if hasattr(group, "list_commands"):
            groups += [group.get_command(context, name) for name in group.list_commands(context)]
        for option in group.params:
            found |= {*option.opts, *option.secondary_opts}
    for name in repository():
        if name.endswith(".py"):
            text = (ROOT / name).read_text(encoding="utf-8")
            found |= {*re.findall(r'add_argument\(\s*"(--[\w-]+)"', text)}
    texts = [patch.data.decode() for patch in read_patches()]
    texts += [(llama_cpp_source(name) / "common/arg.cpp").read_text() for name in base_names()]
    for text in texts:
        for names in re.findall(r"^\+? *\{(\"-.*?)\}", text, re.MULTILINE):
            found |= {*re.findall(r'"(--[\w-]+)"', names)}
    return found


@pytest.mark.upstream
def test_options_exist() -> None:
    """Those of other programs are named somewhere, too."""
    others = {option for line in OTHERS.values() for option in line.split()}
    named = {
        option: path
        for path in texts()
        if path.suffix in (".md", ".py")
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*\w", shown(path))
    }
    known = known_options()
    assert {option: path for option, path in named.items() if option not in known | others} == {}
    assert others <= named.keys() - known


def anchors(page: Path) -> set[str]:
    """The names of a page's headings and of its bold questions, as GitHub makes them."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}
