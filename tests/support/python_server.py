"""Runs llama_cpp's own server over MTPLlama, by the program in docs/native.md."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.models import ROOT
from support.ports import free_port


@contextmanager
def python_server(model: Path, folder: Path, *, context: int = 512) -> Iterator[int]:
    """The port of a server with a model; `folder` gets its log."""
    (folder / "model.gguf").symlink_to(model)
    page = (ROOT / "docs" / "native.md").read_text(encoding="utf-8")
    (code,) = (c for c in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "uvicorn" in c)
    port = free_port()
    code = code.replace("port=8000", f"port={port}").replace("8192", str(context))
    log = folder / "log"
    with log.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, "-c", code], cwd=folder, stderr=file, stdout=file
        )
        try:
            for _ in range(300):
                assert server.poll() is None, log.read_text()
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.1)
            yield port
        finally:
            server.kill()
            server.wait()
