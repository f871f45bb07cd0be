"""Builds the native library in other configurations, and runs tests with such a build."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Build:
    """Sources and a configured build folder."""

    source: Path
    folder: Path

    def library(self, name: str = "mtp") -> Path:
        """Build what the sources now hold."""
        command = ["cmake", "--build", str(self.folder), "--target", name, "--parallel", "2"]
        subprocess.run(command, check=True, capture_output=True)
        return next(self.folder.glob(f"native/**/lib{name}.*"))


def configure(source: Path, folder: Path, *options: str) -> Build:
    """A build against the llama.cpp of this environment."""
    prefix = f"-DCMAKE_PREFIX_PATH={sysconfig.get_path('purelib')}"
    release = "-DCMAKE_BUILD_TYPE=Release"
    command = ["cmake", "-S", str(source), "-B", str(folder), release, prefix, *options]
    subprocess.run(command, check=True, capture_output=True)
    return Build(source, folder)


def run_tests(
    library: Path, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run tests of tests/native, with pytest's `arguments`, over a library."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(
        command,
        check=False,
        cwd=ROOT / "tests" / "native",
        env={**os.environ, "MTP_GGUF_NATIVE_LIB": str(library), **environment},
        capture_output=True,
        text=True,
    )
