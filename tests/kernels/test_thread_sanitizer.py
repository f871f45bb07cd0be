"""The kernels' library under ThreadSanitizer: 70 threads, each with a thread pool of its own.

    pytest -m slow tests/kernels/test_thread_sanitizer.py

builds it and ggml's CPU backend, plain and with our patches, without OpenMP, whose synchronization
the sanitizer does not see.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.llama_sources import built, built_with_patches
from support.native_build import ROOT, configure

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not sys.platform.startswith("linux") or not shutil.which("g++"),
        reason="needs Linux and g++, whose sanitizer can be preloaded",
    ),
]

FLAGS = [
    *("-DCMAKE_C_COMPILER=gcc", "-DCMAKE_CXX_COMPILER=g++"),
    *(f"-DCMAKE_{language}_FLAGS=-fsanitize=thread -g1" for language in ("C", "CXX")),
    *(f"-DCMAKE_{language}_FLAGS_RELEASE=-O1" for language in ("C", "CXX")),
]
# glibc frees the thread-local memory of threads that ended, unseen by the sanitizer.
SUPPRESSED = "race:_dl_deallocate_tls\n"


@pytest.mark.parametrize("patched", [False, True], ids=["stock", "patched"])
def test_no_thread_reads_what_another_one_writes(patched: bool, tmp_path: Path) -> None:
    options = [*FLAGS, "-DGGML_OPENMP=OFF"]
    if patched:
        libraries = built_with_patches(tmp_path, "ggml-cpu", options=options)
    else:
        place = ("llama-cpp-python", "0.3.36", "vendor/llama.cpp")
        libraries = built(tmp_path, *place, "ggml-cpu", options=options)
    library = configure(ROOT, tmp_path / "kernels", *FLAGS).library("mtp_kernels")
    suppressions = tmp_path / "suppressions"
    suppressions.write_text(SUPPRESSED, encoding="utf-8")
    runtime = subprocess.run(
        ["g++", "-print-file-name=libtsan.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    done = subprocess.run(
        [sys.executable, "-m", "support.kernels.threads", str(libraries), str(library)],
        cwd=ROOT / "tests",
        env={
            **os.environ,
            "LD_PRELOAD": runtime,
            "TSAN_OPTIONS": f"die_after_fork=0:suppressions={suppressions}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert "WARNING: ThreadSanitizer" not in done.stderr, done.stderr[:8000]
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["wrong"], found["child"]) == (0, 0)
    assert min(found["computed"]) > 300
