"""The code's own standards: formatting, lint, types, and what the README promises of CI."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Which rooms each room may import; `cli` may import every one but `plugins`, which other programs
# import. Nobody imports `cli` or `plugins`.
ALLOWED_IMPORTS = {
    "gguf_tools": set[str](),
    "convert": {"bench", "gguf_tools", "native", "quantize", "server"},
    "native": {"gguf_tools"},
    "quantize": {"gguf_tools", "native"},
    "server": {"gguf_tools"},
    "bench": {"gguf_tools", "native", "server"},
    "plugins": {"gguf_tools", "native"},
    "publish": {"convert", "gguf_tools"},
    "train": {"bench", "convert", "gguf_tools", "native", "quantize"},
    "cli": {"bench", "convert", "gguf_tools", "native", "publish", "quantize", "server", "train"},
}
PACKAGES = (*ALLOWED_IMPORTS,)
TOP = "src/mtp_gguf"
PYTHON = (*PACKAGES, TOP, "patches", "tests", "benchmarks", "docs")


def run(*command: str, **environment: str) -> None:
    """Run a Python tool in the repository; fail with its report."""
    result = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_formatted() -> None:
    run("ruff", "format", "--check", *PYTHON)


def test_lint() -> None:
    run("ruff", "check", *PYTHON)


def test_types(tmp_path: Path) -> None:
    """mypy is shown the packages under their import names, which their folders do not have."""
    (tmp_path / "mtp_gguf").mkdir()
    for package in PACKAGES:
        (tmp_path / "mtp_gguf" / package).symlink_to(ROOT / package, target_is_directory=True)
    for file in (ROOT / TOP).iterdir():
        (tmp_path / "mtp_gguf" / file.name).symlink_to(file)
    packages = [str(tmp_path / "mtp_gguf")]
    options = ("--explicit-package-bases", "--cache-dir", str(ROOT / ".mypy_cache"))
    path = os.pathsep.join([str(tmp_path), str(ROOT / "tests")])
    run("mypy", *options, *packages, str(ROOT / "tests"), MYPYPATH=path)


def imported_modules(path: Path) -> list[str]:
    """The modules of other rooms that a file imports, without the leading `mtp_gguf.`."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.module or node.level:
            continue
        package, _, module = node.module.partition(".")
        if package != "mtp_gguf":
            continue
        is_room = "." not in module  # `from mtp_gguf.quantize import ggml` imports quantize.ggml
        modules += [f"{module}.{alias.name}" for alias in node.names] if is_room else [module]
    return modules


@pytest.mark.parametrize("room", ALLOWED_IMPORTS)
def test_imports_run_one_way(room: str) -> None:
    """Every file of a room imports only the rooms below it, as docs/architecture.md draws them.

    And no private module of another.
    """
    allowed = ALLOWED_IMPORTS[room]
    for path in sorted((ROOT / room).rglob("*.py")):
        for module in imported_modules(path):
            rightly = module.partition(".")[0] in allowed and "._" not in module
            assert rightly, f"{path.relative_to(ROOT)} imports {module}"


def test_one_module_imports_llama_cpp() -> None:
    """native/runtime.py chooses the libraries that are loaded: an import of llama_cpp elsewhere,
    before it, would make everything run on those of llama-cpp-python.
    """
    for room in (*PACKAGES, "tests", "benchmarks"):
        for path in sorted((ROOT / room).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                modules = [n.name for n in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and room in PACKAGES and not node.level:
                    modules = [node.module or ""]
                imported = any(module.split(".")[0] == "llama_cpp" for module in modules)
                assert not imported or name == "native/runtime.py", f"{name} imports llama_cpp"


def test_one_module_parses_json() -> None:
    """Elsewhere a text that is nested too deeply would end in a traceback."""
    for path in (path for room in PACKAGES for path in sorted((ROOT / room).rglob("*.py"))):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        own = name == "gguf_tools/files/json_text.py"
        assert own or not re.search(r"\bjson\.loads?\(", text), f"{name} parses JSON by itself"


def imports() -> dict[str, set[str]]:
    """The modules that each module imports."""
    files = {}
    for room in ALLOWED_IMPORTS:
        for path in (ROOT / room).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            files[name.removesuffix(".__init__")] = path
    graph: dict[str, set[str]] = {}
    for name, path in files.items():
        package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        graph[name] = set()
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            start = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            module = module.removeprefix("mtp_gguf.")
            for alias in node.names:
                found = f"{module}.{alias.name}"
                graph[name].add(found if found in files else module)
        graph[name] = {module for module in graph[name] - {name} if module in files}
    return graph


def test_no_import_cycles() -> None:
    """Imports inside functions and for types count, too: they hide a cycle and do not remove it."""
    graph = imports()
    assert len(graph) > 100
    while leaves := [name for name, needs in graph.items() if not needs & graph.keys()]:
        for name in leaves:
            del graph[name]
    for _ in range(len(graph)):  # what only leads to a cycle is not part of one
        used = set().union(*graph.values()) if graph else set()
        graph = {name: needs for name, needs in graph.items() if name in used}
    assert not graph, f"import cycles among {sorted(graph)}"


@pytest.mark.parametrize("heading", ["Try it", "Test it"])
def test_readme_has_the_command(heading: str) -> None:
    """CI runs the very line that the README gives."""
    readme = (ROOT / "README.md").read_text()
    section = readme.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    assert "pip install" in section
    if heading == "Test it":
        line = next(li.strip() for li in section.splitlines() if li.strip().startswith("pip "))
        assert line in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("room", ["convert", "gguf_tools", "native"])
def test_folders_are_small(room: str) -> None:
    """A newcomer guesses the folder of a question, and then reads a list of at most 16 modules."""
    for folder in [ROOT / room, *(p.parent for p in (ROOT / room).rglob("__init__.py"))]:
        assert len(list(folder.glob("*.py"))) <= 16, folder
