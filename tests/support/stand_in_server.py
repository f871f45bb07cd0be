"""A fake llama-server for behaviour that cannot be provoked in a real one.

Options of its own: `--die CODE` while loading, `--load SECONDS`, `--end CODE` when told to stop,
`--armed FILE`, created once it handles signals, `--deaf N`: the first N signals do not end it,
`--any-site`: web pages of any site may read its answers.
"""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path

STOCK_HELP = "--model FNAME --spec-type none,draft-mtp,draft-eagle3"
OLDER_HELP = f"{STOCK_HELP} drafts with the FastMTP vocabulary of the file --spec-draft-fused"
PATCHED_HELP = (
    f"{OLDER_HELP} --spec-draft-n-max N auto:N ngram-cache,lookup --spec-lookup-index FNAME"
    " --session-dir PATH --share-sessions --spec-draft-head-type TYPE"
)

_CODE = """
import sys

def value(option, otherwise):
    return sys.argv[sys.argv.index(option) + 1] if option in sys.argv else otherwise

if "--version" in sys.argv:
    sys.exit(print("version: stand-in") or 0)
if "--help" in sys.argv:
    sys.exit(print(HELP) or 0)
if "--list-devices" in sys.argv:
    sys.exit(print("Available devices:\\n  Stand0: stand-in (1 MiB, 1 MiB free)") or 0)
print("stand-in: started with", sys.argv[1:], flush=True)
if "--die" in sys.argv:
    for i in range(100):
        print(f"loading: line {i}", flush=True)
    sys.exit(int(value("--die", "1")))

import signal, time
from http.server import BaseHTTPRequestHandler, HTTPServer

ready = time.monotonic() + float(value("--load", "0"))

class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() >= ready and self.path == "/health" else 503)
        if "--any-site" in sys.argv:
            self.send_header("Access-Control-Allow-Origin", self.headers["Origin"] or "")
        self.end_headers()
    def log_message(self, *_):
        pass

deaf = int(value("--deaf", "0"))

def stop(number, _frame):
    global deaf
    print("stand-in: signal", number, flush=True)
    deaf -= 1
    if deaf < 0:
        sys.exit(int(value("--end", "0")))

signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
if armed := value("--armed", ""):
    open(armed, "x").close()
server = HTTPServer((value("--host", ""), int(value("--port", "0"))), Health)
server.timeout = 0.05
while True:
    server.handle_request()
"""


def write_stand_in(path: Path, usage: str = STOCK_HELP) -> Path:
    """Write the program to `path`, with `usage` as what its --help prints."""
    code = textwrap.dedent(_CODE)
    path.write_text(f"#!{sys.executable}\nHELP = {usage!r}\n{code}", encoding="utf-8")
    path.chmod(path.stat().st_mode | 0o111)
    assert os.access(path, os.X_OK)
    return path
