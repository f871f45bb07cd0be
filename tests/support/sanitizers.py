"""Python on libraries that g++ built with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

needs_sanitizers = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not shutil.which("cmake") or not shutil.which("g++"),
    reason="needs Linux, CMake and g++, whose sanitizers can be preloaded",
)


def sanitizer_environment() -> dict[str, str]:
    """Both runtimes come first in the process; what Python never frees is no leak of ours."""
    runtimes = [
        subprocess.run(
            ["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
