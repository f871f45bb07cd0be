"""The code's own standards: formatting, lint, types, and what the README promises of CI."""

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


@pytest.mark.parametrize("heading", ["Try it", "Test it"])
def test_readme_has_the_command(heading: str) -> None:
    """CI runs the very line that the README gives."""
    readme = (ROOT / "README.md").read_text()
    section = readme.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    assert "pip install" in section
    if heading == "Test it":
        line = next(li.strip() for li in section.splitlines() if li.strip().startswith("pip "))
        assert line in (ROOT / ".ci" / "run").read_text()
