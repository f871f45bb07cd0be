"""Upstream's own server tests with a model of this machine.

    python tests/server/upstream_suite.py LLAMA_CPP MODEL.gguf SERVER [OTHER] [-- PYTEST OPTIONS]

LLAMA_CPP: an unpacked llama.cpp tree (its tools/server/tests is run, and nothing in it is changed).
The tests name models on a hub. Where nothing can be downloaded MODEL takes the place of all of
them, and what a test says about the text of its own model then fails on any server. So the same
tests run on OTHER_SERVER, a stock one, and what counts is what passes there and fails on SERVER,
which drafts with MODEL's head in every test. Prints the outcomes that differ and how many there are
of each kind; the exit code is 1 where something passes on OTHER alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

MODEL, OUTCOMES = "MTP_GGUF_SUITE_MODEL", "MTP_GGUF_SUITE_OUTCOMES"
DRAFTS = {"LLAMA_ARG_SPEC_TYPE": "draft-mtp", "LLAMA_ARG_SPEC_DRAFT_N_MAX": "3"}


def pytest_configure() -> None:
    """Run as a plugin of upstream's tests: every server gets our model."""
    import utils  # type: ignore[import-not-found] # noqa: PLC0415 - upstream's, there as a plugin

    start = utils.ServerProcess.start

    def start_ours(self: Any, *words: Any, **named: Any) -> Any:
        if self.model_hf_repo and not self.model_file and not self.models_dir:
            self.model_file, self.model_hf_repo, self.model_hf_file = os.environ[MODEL], None, None
        return start(self, *words, **named)

    utils.ServerProcess.start = start_ours
    utils.ServerPreset.load_all = staticmethod(lambda: None)  # it would download


def pytest_runtest_logreport(report: Any) -> None:
    """Write down how each test ended."""
    if report.when == "call" or report.outcome != "passed":
        with open(os.environ[OUTCOMES], "a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, report.outcome]) + "\n")


def run(tests: Path, model: Path, server: Path, drafts: bool, passed: list[str]) -> dict[str, str]:
    """The outcome of each test on a server."""
    with tempfile.TemporaryDirectory() as scratch:
        outcomes = Path(scratch) / "outcomes"
        outcomes.touch()
        environment = {
            **os.environ,
            **(DRAFTS if drafts else {}),
            MODEL: str(model.resolve()),
            OUTCOMES: str(outcomes),
            "LLAMA_SERVER_BIN_PATH": str(server.resolve()),
            "LLAMA_CACHE": scratch,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(tests)]),
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "upstream_suite", "-m", "not slow"]
        command += ["-p", "no:cacheprovider", "--tb=no", *passed]
        subprocess.run(command, cwd=tests, env=environment, check=False)
        # a test that fails in more than one phase is there more than once
        return dict(json.loads(line) for line in outcomes.read_text().splitlines())


def main(words: list[str]) -> int:
    """Do what the command line says; the exit code."""
    at = words.index("--") if "--" in words else len(words)
    named, passed = words[:at], words[at + 1 :]
    if len(named) not in (3, 4):
        print(__doc__, file=sys.stderr)
        return 2
    tree, model, *servers = map(Path, named)
    tests = tree / "tools" / "server" / "tests"
    ours = run(tests, model, servers[0], True, passed)
    print("this server:", dict(Counter(ours.values())))
    if len(servers) == 1:
        return 0
    theirs = run(tests, model, servers[1], False, passed)
    print("other server:", dict(Counter(theirs.values())))
    lost = False
    for test in sorted(ours.keys() | theirs.keys()):
        pair = ours.get(test, "not run"), theirs.get(test, "not run")
        if pair[0] != pair[1]:
            print(f"{test}: {pair[0]} here, {pair[1]} there")
            lost |= pair[1] == "passed"
    return int(lost)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
