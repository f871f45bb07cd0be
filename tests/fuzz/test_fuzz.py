"""The fuzz targets on their corpus and its mutants; and ten seconds of atheris for each.

MTP_FUZZ_SECONDS changes the ten seconds: 300 for each target is the long run, 0 is none.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.corpus import starts
from fuzz.targets import TARGETS

from support.golden_gguf import mutant

SECONDS = int(os.environ.get("MTP_FUZZ_SECONDS", "10"))
MUTANTS = 20  # of each file of the corpus
LEAST_COVERAGE = 50  # edges; both targets reach more at once, unless nothing is instrumented


@pytest.mark.parametrize("name", TARGETS)
def test_corpus_and_mutants(name: str) -> None:
    source = random.Random(7)
    for data in starts(name):
        TARGETS[name](data)
        for _ in range(MUTANTS if data else 0):
            TARGETS[name](mutant(data, source))


@pytest.mark.thorough
@pytest.mark.skipif(SECONDS == 0, reason="MTP_FUZZ_SECONDS is 0")
@pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="atheris is not to be had here"
)
@pytest.mark.parametrize("name", TARGETS)
def test_fuzz(name: str, tmp_path: Path) -> None:
    script = Path(__file__).with_name("run.py")
    result = subprocess.run(
        [
            sys.executable,
            str(script),
            name,
            f"-max_total_time={SECONDS}",
            "-timeout=60",
            "-rss_limit_mb=4096",
            f"-artifact_prefix={tmp_path}/",
            "-print_final_stats=1",
        ],
        capture_output=True,
        text=True,
        timeout=2 * SECONDS + 120,
        check=False,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-5000:]
    covered = [int(n) for n in re.findall(r" cov: (\d+) ", result.stderr)]
    assert max(covered, default=0) > LEAST_COVERAGE, result.stderr[-5000:]
