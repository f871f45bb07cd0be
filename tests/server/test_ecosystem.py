"""The programs of docs/ecosystem.md run as they are, over the real server and in process.

Run it with `pip install ".[test,ecosystem]" && pytest -m ecosystem`. Programs whose packages are
not installed are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.commands import run_python
from support.models import ROOT, Files
from support.real_server import Server

PAGE = ROOT / "docs" / "ecosystem.md"
PORT = "8080"  # in the programs

pytestmark = [pytest.mark.ecosystem, pytest.mark.server]


def programs() -> Iterator[tuple[str, str]]:
    """The programs of the page with their names: the section, and how they reach the model."""
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        title = section.partition("\n")[0]
        for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
            yield f"{title}, {'server' if PORT in code else 'in process'}", code


PROGRAMS = dict(programs())


def test_every_program_has_a_name() -> None:
    assert len(PROGRAMS) == PAGE.read_text(encoding="utf-8").count("```python") == 9


@pytest.fixture(scope="module")
def port(server: Server, files: Files) -> Iterator[int]:
    """The port of a server with the demo model."""
    with server.running(files("ids", "demo"), "--parallel", 2) as client:
        yield client.port


@pytest.mark.parametrize("name", PROGRAMS)
def test_runs(name: str, files: Files, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    code = PROGRAMS[name]
    for module in re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE):
        if find_spec(module) is None:
            pytest.skip(f"{module} is not installed; pip install '.[ecosystem]'")
    if PORT in code:
        code = code.replace(PORT, str(request.getfixturevalue("port")))
    (tmp_path / "model.gguf").symlink_to(files("ids", "demo"))
    output = run_python(code, cwd=tmp_path, timeout=300)
    assert output.strip()
    if "mtp_stats" in code:
        acceptance = output.splitlines()[-1]
        assert re.search(r"0\.[1-9]|1\.0", acceptance), acceptance
