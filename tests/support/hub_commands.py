"""Running commands against the hub on loopback, several in one process, with a cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.hub_server import Hub

_COMMANDS = """
import json, sys, time, traceback
time.sleep = lambda seconds: None  # between the client's attempts
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = 500
from typer.testing import CliRunner
from mtp_gguf.cli import app
results = []
for words in json.load(sys.stdin):
    if words[0] == "tune":  # which stores nothing on a busy machine
        from mtp_gguf.bench import tune
        tune.warnings_of = lambda *_: ()
    done = CliRunner().invoke(app, words)
    error = done.exception
    unexpected = error is not None and not isinstance(error, SystemExit)
    told = "".join(traceback.format_exception(error)) if unexpected else ""
    results.append([done.exit_code, done.stdout, done.stderr + told])
json.dump(results, sys.stdout)
"""


@dataclass
class Done:
    """How a command ended; `last` is the last line on standard error."""

    code: int
    stdout: str
    stderr: str

    @property
    def last(self) -> str:
        return self.stderr.splitlines()[-1]

    @property
    def fields(self) -> Any:
        """What it printed as JSON; it must have succeeded."""
        assert self.code == 0, self.stderr
        return json.loads(self.stdout)


def environment(hub: Hub, home: Path, **env: str) -> dict[str, str]:
    """The environment of a process that uses this hub, with its cache in `home`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k}
    return kept | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home)} | env


def run_commands(hub: Hub, home: Path, *commands: tuple[object, ...], **env: str) -> list[Done]:
    """Run commands one after the other in one process, in the folder of `home`."""
    done = subprocess.run(
        [sys.executable, "-c", _COMMANDS],
        input=json.dumps([[str(word) for word in words] for words in commands]),
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
        cwd=home.parent,
        env=environment(hub, home, **env),
    )
    assert done.returncode == 0, done.stderr
    results = [Done(*result) for result in json.loads(done.stdout)]
    assert not any("Traceback" in result.stderr for result in results), results
    return results


def downloaded(home: Path) -> set[str]:
    """What the cache in `home` holds, as names in the repository."""
    return {
        path.relative_to(folder).as_posix()
        for folder in home.glob("hub/models--*/snapshots/*")
        for path in folder.rglob("*")
        if path.is_file()
    }
