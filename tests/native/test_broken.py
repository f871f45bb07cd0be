"""The equality tests fail if the native library is wrong.

    pytest -m slow tests/native/test_broken.py

Each case changes one line in a copy of the sources, builds it and runs one test with it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from mtp_gguf.native.runtime import VARIABLE
from support.llama_libraries import STOCK
from support.native_build import ROOT, Build, configure, run_tests

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

SAMPLING = "test_sampling_demo.py::test_three_tokens_follow_the_trunks_distribution"
EXACT = "test_exact.py::test_bases_whose_products_change_at_two_rows"
DRAFTS = "test_head.py::test_drafts_equal_the_reference"


@dataclass(frozen=True)
class Break:
    """A line of native/src to replace, and the test that must detect it."""

    file: str
    right: str
    wrong: str
    proof: str


BREAKS = {
    "nothing is subtracted for the residual": Break(
        "session/session.cpp",
        "p.weights[i] = std::max(0.0, p.weights[i] / p.total - q);",
        "p.weights[i] = std::max(0.0, p.weights[i] / p.total - 0 * q);",
        SAMPLING,
    ),
    "the residual does not sum to one": Break(
        "session/session.cpp", "p.total = left;", "p.total = 1;", SAMPLING
    ),
    "drafts are accepted by p alone": Break(
        "session/session.cpp",
        "sampling_->uniform() * q[i] < target_.of(drafts[i])",
        "sampling_->uniform() < target_.of(drafts[i])",
        SAMPLING,
    ),
    "every token that is possible for the trunk is accepted": Break(
        "session/session.cpp",
        "sampling_->uniform() * q[i] < target_.of(drafts[i])",
        "0 < target_.of(drafts[i])",
        SAMPLING,
    ),
    "a token is alone in its batch": Break(
        "session/trunk.cpp",
        "size_t(std::max(n, min_rows))",
        "size_t(std::max(n, 0 * min_rows + 1))",
        EXACT,
    ),
    "a padding token stays": Break(
        "session/trunk.cpp",
        "if (n < min_rows && !remove_tail(seq, first + n))",
        "if (n < 0 && !remove_tail(seq, first + n))",
        EXACT,
    ),
    "an accepted token is lost": Break(
        "session/session.cpp",
        "s.length = cycle_.first + 1 + n_accepted;",
        "s.length = cycle_.first + (n_accepted > 0 ? n_accepted : 1);",
        EXACT,
    ),
    "the second step continues from the trunk's hidden state": Break(
        "head/draft_graph.cpp",
        "x = project(chosen, hidden_);",
        "x = project(chosen, last_column(g_.hidden_));",
        DRAFTS,
    ),
    "the third step has the second's position": Break(
        "head/draft_graph.cpp",
        "const int64_t at = last + step;",
        "const int64_t at = last + (step > 1 ? 1 : step);",
        DRAFTS,
    ),
}


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Build a copy of the sources."""
    source = tmp_path_factory.mktemp("source")
    shutil.copy(ROOT / "CMakeLists.txt", source)
    shutil.copytree(ROOT / "native", source / "native")
    return configure(source, source / "build")


def passes(proof: str, library: Path) -> bool:
    """Whether a test passes with a library; the run must complete.

    EXACT is about batches that only the stock kernels need.
    """
    stock = {VARIABLE: STOCK} if proof == EXACT else {}
    done = run_tests(library, "-x", proof, **stock)
    assert done.returncode in (0, 1), done.stdout  # 1: some test failed
    return done.returncode == 0


@pytest.mark.parametrize("proof", [SAMPLING, EXACT, DRAFTS])
def test_right_code_passes(build: Build, proof: str) -> None:
    assert passes(proof, build.library())


@pytest.mark.parametrize("name", BREAKS)
def test_wrong_code_is_noticed(build: Build, name: str) -> None:
    case = BREAKS[name]
    file = build.source / "native" / "src" / case.file
    right = file.read_text(encoding="utf-8")
    assert right.count(case.right) == 1
    file.write_text(right.replace(case.right, case.wrong), encoding="utf-8")
    try:
        assert not passes(case.proof, build.library())
    finally:
        file.write_text(right, encoding="utf-8")
