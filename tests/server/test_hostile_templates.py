"""A chat template that crashes, never ends or takes all memory ends no server but its own."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from support.hostile_templates import HOSTILE
from support.models import Files
from support.real_server import SETTINGS, post
from support.serving import PATIENCE, wait_for

pytestmark = [pytest.mark.server, pytest.mark.thorough]

BODY = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_server_refuses_or_answers(
    patched_server: Path, files: Files, free_port: int, tmp_path: Path, name: str
) -> None:
    """It ends at its start, or answers each request, if with an error, and goes on."""
    template, log = tmp_path / "template.jinja", tmp_path / "log"
    template.write_text(HOSTILE[name])
    command = [patched_server, "--model", files("plain"), "--port", free_port, *SETTINGS]
    command += ["--jinja", "--chat-template-file", template]
    with (
        log.open("w") as output,
        subprocess.Popen([str(w) for w in command], stdout=output, stderr=output) as process,
    ):
        try:
            wait_for(
                lambda: process.poll() is not None or "listening on http" in log.read_text(),
                "it is ready or ends",
            )
            if process.poll() is None:
                for _ in range(2):
                    status, found = post(free_port, "/v1/chat/completions", BODY)
                    assert status in {200, 400, 500}, found
                process.send_signal(signal.SIGINT)
                assert process.wait(PATIENCE) == 0
            else:
                assert process.returncode == 1, log.read_text()[-2000:]
        finally:
            process.kill()
