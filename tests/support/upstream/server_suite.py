"""Upstream's own server tests with a local model.

    python tests/support/upstream/server_suite.py LLAMA_CPP MODEL.gguf SERVER [OTHER] \
        [-- PYTEST OPTIONS]

LLAMA_CPP: an unpacked llama.cpp tree, of which tools/server/tests is run in a copy. The tests name
models on a hub. Where nothing can be downloaded MODEL takes the place of all of them, draft models,
too, and what a test says about the text of its own model then fails on any server. So the same
tests run on OTHER, a stock server, and what counts is what passes there and fails on SERVER. All of
it happens twice: with drafting by MODEL's head in every test, and with drafting only where a test
asks for it. Nothing is repacked and one core computes, so that drafting turns no near tie.

Prints for each file of tests how many pass, then the tests that do not pass on both servers; the
exit code is 1 where something passes on OTHER alone. With the demo model a run takes some 7 minutes
for each server and way of drafting.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MODEL, OUTCOMES = "MTP_GGUF_SUITE_MODEL", "MTP_GGUF_SUITE_OUTCOMES"
DRAFTS = {"LLAMA_ARG_SPEC_TYPE": "draft-mtp", "LLAMA_ARG_SPEC_DRAFT_N_MAX": "3"}
PASSED = "passed"
PATIENCE = 300  # seconds in which a server is to start on a busy machine; upstream says 60


def pytest_configure() -> None:
    """Run as a plugin of upstream's tests: every server gets our model."""
    import utils  # type: ignore[import-not-found] # noqa: PLC0415 - upstream's, there as a plugin

    start = utils.ServerProcess.start

    def start_ours(self: Any, *words: Any, **named: Any) -> Any:
        if self.model_hf_repo and not self.model_file and not self.models_dir:
            self.model_file, self.model_hf_repo, self.model_hf_file = os.environ[MODEL], None, None
        if self.spec_type == "draft-simple":  # a model for drafts, of which ours has a part
            self.model_draft, self.spec_type = None, "draft-mtp"
        return start(self, *words, **{"timeout_seconds": PATIENCE, **named})

    utils.ServerProcess.start = start_ours
    utils.ServerPreset.load_all = staticmethod(lambda: None)  # it would download
    utils.download_file = lambda *_: os.environ[MODEL]


def pytest_runtest_logreport(report: Any) -> None:
    """Write down how each test ended."""
    if report.when == "call" or report.outcome != PASSED:
        with open(os.environ[OUTCOMES], "a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, report.outcome]) + "\n")


def copy_tests(tree: Path, scratch: Path) -> Path:
    """A copy of the tests that finds what they look for in the tree around it."""
    tests = scratch / "tools" / "server" / "tests"
    shutil.copytree(tree / "tools" / "server" / "tests", tests)
    (tests / "tmp").mkdir(exist_ok=True)  # which downloads would make, and saved slots take
    for folder in ("models", "tools/mtmd"):
        (scratch / folder).symlink_to((tree / folder).resolve())
    return tests


def run(tree: Path, model: Path, server: Path, drafts: bool, passed: list[str]) -> dict[str, str]:
    """The outcome of each test on a server."""
    with tempfile.TemporaryDirectory() as scratch:
        tests = copy_tests(tree, Path(scratch))
        outcomes = Path(scratch) / "outcomes"
        outcomes.touch()
        environment = {
            **os.environ,
            **(DRAFTS if drafts else {}),
            "LLAMA_ARG_REPACK": "0",
            "LLAMA_ARG_THREADS": "1",
            MODEL: str(model.resolve()),
            OUTCOMES: str(outcomes),
            "LLAMA_SERVER_BIN_PATH": str(server.resolve()),
            "LLAMA_CACHE": scratch,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(tests)]),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "--tb=no"]
        command += ["-p", "support.upstream.server_suite", "-p", "no:cacheprovider", *passed]
        subprocess.run(command, cwd=tests, env=environment, check=False)
        # a test that fails in more than one phase is there more than once
        return dict(json.loads(line) for line in outcomes.read_text().splitlines())


def print_files(servers: list[dict[str, str]]) -> None:
    """A line for each file of tests: how many pass."""
    files: defaultdict[str, list[str]] = defaultdict(list)
    for test in tests_of(servers):
        files[test.split("::")[0]].append(test)
    for file, tests in files.items():
        counts = [sum(outcomes.get(test) == PASSED for test in tests) for outcomes in servers]
        print(f"{file}: {len(tests)} tests, passed: {', '.join(map(str, counts))}")


def print_rest(servers: list[dict[str, str]]) -> bool:
    """The tests that do not pass everywhere; whether one passes on the second server alone."""
    lost = False
    for test in tests_of(servers):
        outcomes = [outcomes.get(test, "not run") for outcomes in servers]
        if set(outcomes) != {PASSED}:
            print(f"{test}: {', '.join(outcomes)}")
        lost |= outcomes[0] != PASSED == outcomes[-1]
    return lost


def tests_of(servers: Iterable[dict[str, str]]) -> list[str]:
    """All tests that any of the servers was given, by name."""
    return sorted({test for outcomes in servers for test in outcomes})


def main(words: list[str]) -> int:
    """Do what the command line says; the exit code."""
    at = words.index("--") if "--" in words else len(words)
    named, passed = words[:at], words[at + 1 :]
    if len(named) not in (3, 4):
        print(__doc__, file=sys.stderr)
        return 2
    tree, model, *binaries = map(Path, named)
    lost = False
    for drafts in (True, False):
        servers = [run(tree, model, binary, drafts, passed) for binary in binaries]
        print("drafting in every test:" if drafts else "drafting where a test asks for it:")
        print_files(servers)
        lost |= print_rest(servers)
    return int(lost)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
