"""The native library under AddressSanitizer and UndefinedBehaviorSanitizer.

    pytest -m slow tests/native/test_sanitized.py

runs all everyday tests of this folder; in everyday runs those of refused input alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.native_build import ROOT, configure, run_tests
from support.sanitizers import needs_sanitizers, sanitizer_environment

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs_sanitizers
REFUSALS = [
    "test_refusals.py",
    "test_checkpoint.py::test_hostile_bytes",
    "test_checkpoint.py::test_random_damage_never_crashes",
    "test_head.py::test_arguments_are_checked",
    "test_lookup.py::test_damaged_texts_are_refused",
    "test_lookup.py::test_drafts_after_a_restore_are_those_without_it",
    "test_lookup_files.py::test_damaged_and_foreign_indexes_are_refused",
    "test_lookup_files.py::test_forged_indexes_are_refused",
    "test_session_file.py::test_a_section_that_ends_before_it_begins",
    "test_session_file.py::test_forged_headers_are_refused",
    "test_suffix_index.py::test_matches_are_the_longest_and_real",
    "test_text_drafts.py",
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # -O1: half the time to build
    options = ["-DMTP_SANITIZE=ON", "-DCMAKE_CXX_COMPILER=g++", "-DCMAKE_CXX_FLAGS_RELEASE=-O1"]
    return configure(ROOT, tmp_path_factory.mktemp("sanitized"), *options).library()


def check(library: Path, *arguments: str) -> None:
    # -s: a report is written as the process dies
    done = run_tests(library, "-s", *arguments, **sanitizer_environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


@pytest.mark.thorough
def test_input_that_is_refused(library: Path) -> None:
    check(library, *REFUSALS)


@pytest.mark.slow
def test_everything(library: Path) -> None:
    check(library, "--ignore=test_sanitized.py", ".")
