"""The documentation says what the code does, and so do comments, docstrings, help and errors.

Pages that are made, commands, tables, links, and names of patches, files, tests and options.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
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
from support.pages import BLOCK, DOCS, PAGES, blocks, fits, prose, repository, shown, words_of


def made_page(name: str) -> str:
    command = [sys.executable, str(DOCS / f"make_{name}.py")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_tensors_page_is_the_codes() -> None:
    assert made_page("tensors") == (DOCS / "tensors.md").read_text(encoding="utf-8")


def test_commands_page_has_the_commands_and_options_of_the_code() -> None:
    """Typer's versions differ in how they print types and defaults."""
    pages = made_page("commands"), (DOCS / "commands.md").read_text(encoding="utf-8")
    made, written = (re.findall(r"^(?:## .*|- `[^` ]*)", page, re.MULTILINE) for page in pages)
    assert len(made) > 300
    assert made == written


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


def test_the_demo_runs_the_commands_of_the_readme(tmp_path: Path) -> None:
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
    assert len(headings) == 4
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


@cache
def texts() -> list[Path]:
    """All files with words of ours, but no dated pages and no data."""
    kinds = re.compile(
        r"\.(c|cmake|cpp|h|md|patch|py|toml|yml)$|(^|/)(CMakeLists\.txt|Dockerfile)$"
    )
    left_out = ("tests/goldens/", "benchmarks/results/", "gguf_tools/demo_model/")
    names = (name for name in repository() if not name.startswith(left_out))
    return [ROOT / name for name in names if kinds.search(name) or re.match(r"\.ci/[\w-]+$", name)]


def lines() -> Iterator[tuple[str, str]]:
    """What these files tell their readers, line by line, each with its place."""
    for path in texts():
        for number, line in prose(path):
            yield f"{path.relative_to(ROOT)}:{number}", line


def test_patches_exist() -> None:
    """Every number like 0101 is that of a patch, if not always of the one that is meant."""
    numbers = {patch.name[:4] for patch in read_patches()}
    found = [
        (place, number)
        for place, line in lines()
        for number in re.findall(r"(?<![\w.,/-])0[01]\d\d(?![\w.])(?<!0000)", line)
    ]
    assert len(found) > 50
    assert not [one for one in found if one[1] not in numbers]


@cache
def upstream_files() -> list[str]:
    """The files of llama.cpp, and those that patches add."""
    found = [name for patch in read_patches() for name in ADDED.findall(patch.data.decode())]
    for base in base_names():
        source = llama_cpp_source(base)
        found += [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
    return found


ADDED = re.compile(r"^\+\+\+ b/(\S+)", re.MULTILINE)


@pytest.mark.upstream
def test_files_exist() -> None:
    """Files and folders are named from the root, or by the end of their path, here or upstream."""
    files = repository()
    copied = [name.replace("native/", "vendor/mtp-head/", 1) for name in files]
    known = {
        "/".join(parts[start:end])
        for file in [*files, *copied, *upstream_files()]
        for name in (file, file.rpartition(".")[0])
        for parts in [name.split("/")]
        for end in range(1, len(parts) + 1)
        for start in range(end)
    }
    rooms = "|".join({re.escape(name.partition("/")[0]) for name in files if "/" in name})
    kinds = "c|cmake|comp|cpp|h|hpp|md|patch|py"
    patterns = (
        rf"(?<![\w./~-])((?:{rooms})/[\w./-]*\w)",
        rf"(?<![\w/.*<>{{}}$-])((?:[\w-]+/)*[\w.-]*\w\.(?:{kinds}))(?![\w/(-]|\.\w)",
    )
    beginning = re.compile(r"(patches/(upstream/)?\d{4}|tests/goldens/\w+)$")
    found = {
        name: place
        for place, line in lines()
        for pattern in patterns
        for name in re.findall(pattern, line)
        if not name.startswith(MADE)
        and not (beginning.match(name) and any(file.startswith(name) for file in files))
    }
    assert len(found) > 400
    elsewhere = set(" ".join(FILES_ELSEWHERE.values()).split())
    assert {name: at for name, at in found.items() if name not in known | elsewhere} == {}
    assert elsewhere <= found.keys() - known


@cache
def names_of_tests() -> set[str]:
    """The names of the functions and files of tests."""
    files = [name for name in repository() if re.match(r"tests/.*\.py$", name)]
    texts = ((ROOT / name).read_text(encoding="utf-8") for name in files)
    return {test for text in texts for test in re.findall(r"def (test_\w+)", text)} | {
        Path(name).stem for name in files
    }


def test_tests_exist() -> None:
    found = {n: place for place, line in lines() for n in re.findall(r"\btest_\w+", line)}
    assert len(found) > 50
    assert {name: at for name, at in found.items() if name not in names_of_tests()} == {}


@pytest.mark.upstream
def test_names_in_backticks_exist() -> None:
    """Names of functions, fields, variables and keys are somewhere in our code or llama.cpp's."""
    name = re.compile(r"(?<![\w./-])[A-Za-z]\w*(?:_\w+|[a-z][A-Z]\w+)(?![\w*])")
    found = {
        word: place
        for place, line in lines()
        for span in re.findall(r"(?<!`)`([^`\n]+)`(?!`)", line)
        for word in name.findall(span)
    }
    assert len(found) > 400
    code = "\n".join(code_of(path) for path in texts() if path.suffix not in (".md", ".patch"))
    words = {*re.findall(r"\w+", code)}
    left = [word for word in found if word not in words and f"{word}_" not in words]
    with NamedTemporaryFile("w", suffix=".txt") as list_of_words:
        print(*left, sep="\n", file=list_of_words, flush=True)
        sources = [str(llama_cpp_source(name)) for name in base_names()]
        command = ["grep", "-rohwIF", "-f", list_of_words.name, *sources]
        theirs = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    added = "\n".join(patch.data.decode() for patch in read_patches())
    known = {*theirs.split(), *re.findall(r"\w+", added)}
    parts = "\n".join(
        [*names_of_tests(), *repository(), *upstream_files()]
    )  # of names, as of `pytest -k`
    assert {w: found[w] for w in left if w not in known and w not in parts} == {}


# Beginnings of names that look like those of files here: in a cache, in the installed package.
MADE = ("server/0.3.36", "native/lib/")
# Source files that are not here, by what they belong to.
FILES_ELSEWHERE = {
    "another program": "ik_llama.cpp",
    "an example": "FOLDER/gpu.md Demo-MTP-GGUF/README.md notes.md program.py src/numbers.cpp",
    "Linux": "linux/fiemap.h linux/fs.h",
    "ggml's documentation": "gguf.md",
    "transformers": "modeling_qwen3_5.py modeling_qwen3_5_moe.py modeling_qwen3_next.py",
    "GPT-2": "src/encoder.py",
}
# Options of other programs; those of llama.cpp's common code are looked up there.
OTHERS = {
    "auto-round": "--format --output_dir --scheme",
    "cmake": "--build --target",
    "convert_hf_to_gguf.py": "--fuse-gate-up-exps --fuse-qkv --mtp-shared-embd",
    "convert_hf_to_gguf.py of a vocabulary": "--vocab-only",
    "dask": "--local-directory --nthreads --nworkers",
    "diff": "--git",
    "docker": "--build-arg --isolation --rm",
    "docs/make_tensors.py": "--write",
    "Firefox": "--remote-debugging-pipe",
    "git": "--amend --autosquash --fixup",
    "hf download": "--local-dir",
    "llama-gguf-split": "--split",
    "inspect": "--model-base-url",
    "lm_eval": "--apply_chat_template --batch_size --model_args --tasks",
    "pip": "--find-links --force-reinstall --no-binary --no-build-isolation --no-cache-dir",
    "pip install": "--no-deps --no-index",
    "pytest": "--basetemp",
    "tests/support/stand_in_server.py": "--any-site --armed --deaf --die --end",
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
        found |= {*re.findall(r"--[a-z-]+", getattr(group, "epilog", None) or "")}
    for name in repository():
        if name.endswith(".py"):
            text = (ROOT / name).read_text(encoding="utf-8")
            found |= {*re.findall(r'add_argument\(\s*"(--[\w-]+)"', text)}
            for numbers in re.findall(r"\(\s*__doc__,\s*(\{.*?\})", text, re.DOTALL):
                found |= {*re.findall(r'"(--[\w-]+)"', numbers)}  # benchmarks/measuring.py
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
        option: place
        for place, line in lines()
        for option in re.findall(r"(?<![\w(-])--[a-z][\w-]*\w", line)
    }
    known = known_options()
    assert {option: at for option, at in named.items() if option not in known | others} == {}
    assert others <= named.keys() - known


def test_commands_exist() -> None:
    """In every comment, docstring and error, too."""
    group: Any = typer.main.get_command(app)
    names = {*group.list_commands(typer.Context(group))}
    pattern = r"(?<!llm )mtp-gguf ([a-z][a-z-]+)(?![\w.])"
    found = {word: place for place, line in lines() for word in re.findall(pattern, line)}
    assert {word: at for word, at in found.items() if word not in names | AFTER_THE_NAME} == {}


# Words that follow the name of the package in sentences.
AFTER_THE_NAME = {*re.split(" ", "again and can does find in keeps raises ships was with wrote")}


def test_scripts_have_these_options() -> None:
    """Of a script that is shown with options, each is its own or that of a module beside it."""
    call = re.compile(r"python (?:-m )?((?:\w+/)+\w+\.py)\b([^`|]*)")
    wrong, found = [], 0
    for page in texts():
        text = shown(page)
        spans = [line for _, code in BLOCK.findall(text) for line in joined(code).splitlines()]
        spans += re.findall(r"(?<!`)`([^`]+)`(?!`)", BLOCK.sub("", text))
        for script, words in (match for span in spans for match in call.findall(span)):
            code = with_modules(ROOT / script)
            for option in re.findall(r"(?<![\w-])--[a-z][\w-]*\w", words.partition(" #")[0]):
                found += 1
                if f'"{option}"' not in code:
                    wrong.append(f"{page.relative_to(ROOT)}: {script} {option}")
    assert found > 50
    assert not wrong


def joined(code: str) -> str:
    """Code of a shell with its continued lines in one."""
    return re.sub(r"\\\n\s*", "", code)


def with_modules(script: Path) -> str:
    """The text of a script and of the modules beside it that it imports; empty without it."""
    if not script.exists():
        return ""
    text = script.read_text(encoding="utf-8")
    beside = [path for path in script.parent.glob("*.py") if f"from {path.stem} import" in text]
    return "".join([text, *(path.read_text(encoding="utf-8") for path in beside)])


def code_of(path: Path) -> str:
    """The text of a file without the lines that only tell its readers something."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".c", ".cpp", ".h"):
        return re.sub(r"//.*", "", text)
    for _, line in prose(path):
        text = text.replace(line, "") if line.startswith("#") else text
    return text


def anchors(page: Path) -> set[str]:
    """The names of a page's headings and of its bold questions, as GitHub makes them."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.strip().replace(" ", "-") for heading in plain}
