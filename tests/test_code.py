"""The code's own standards: formatting, lint, types, and what the README promises of CI."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("convert", "gguf_tools", "native")
PYTHON = (*PACKAGES, "patches", "tests", "benchmarks", "docs")


def run(*command: str, **env_paths: Path) -> None:
    """Run a Python tool in the repository; fail with its report."""
    import os  # noqa: PLC0415

    env = os.environ | {name: str(path) for name, path in env_paths.items()}
    result = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=env,
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
    names = [argument for package in PACKAGES for argument in ("-p", f"mtp_gguf.{package}")]
    run(
        "mypy",
        "--explicit-package-bases",
        "--cache-dir",
        str(tmp_path / "cache"),
        *names,
        MYPYPATH=tmp_path,
    )


QUANTIZER = {"ggml", "quantize_upstream"}  # of native, all that convert may know


def test_imports_run_one_way() -> None:
    """As design has it: the format knows nobody, convert knows the format and the quantizer."""
    allowed = {
        "gguf_tools": set[str](),
        "convert": {"gguf_tools", *(f"native.{name}" for name in QUANTIZER)},
        "native": {"gguf_tools"},
    }
    for room, names in allowed.items():
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.parent.name == "cli":
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.ImportFrom) or not node.module:
                    continue
                top, _, rest = node.module.partition(".")
                if top != "mtp_gguf" or node.level:
                    continue
                found = (
                    [f"{rest}.{alias.name}" for alias in node.names] if rest == "native" else [rest]
                )
                for name in found:
                    known = name in names or name.partition(".")[0] in names
                    assert known, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("heading", ["Try it", "Test it"])
def test_readme_has_the_command(heading: str) -> None:
    """CI runs the very line that the README gives."""
    readme = (ROOT / "README.md").read_text()
    section = readme.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    assert "pip install" in section
    if heading == "Test it":
        line = next(li.strip() for li in section.splitlines() if li.strip().startswith("pip "))
        assert line in (ROOT / ".ci" / "run").read_text()
