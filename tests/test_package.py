"""`mtp_gguf` itself, above its packages."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from importlib.metadata import version

import pytest

import mtp_gguf


def test_the_version() -> None:
    assert mtp_gguf.__version__ == version("mtp-gguf")
    with pytest.raises(AttributeError, match="'mtp_gguf' has no attribute 'versoin'"):
        _ = mtp_gguf.versoin


def test_the_command_line_as_a_module() -> None:
    command = [sys.executable, "-m", "mtp_gguf"]
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"mtp-gguf {version('mtp-gguf')}\n"
    done = subprocess.run([*command, "generate"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Usage: python -m mtp_gguf generate ")


def test_type_checkers_read_the_types_of_every_package() -> None:
    assert resources.files("mtp_gguf").joinpath("py.typed").is_file()
