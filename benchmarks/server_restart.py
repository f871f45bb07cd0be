"""Measure the first token of a prompt after a restart of llama-server, with and without sessions.

    python benchmarks/server_restart.py MODEL.gguf --work FOLDER [--tokens 8192] [--threads 2]
        [--rounds 3] [--port 18080]

One server reads the prompt and ends, which writes its session. Then, in each round, a server with
`--session-dir` and one without it are started and asked for one token. The table shows medians.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from statistics import median

from decode import complete
from measuring import heading, options, row


def first_token(arguments: argparse.Namespace, folder: Path | None) -> tuple[float, int]:
    """Seconds from the request to its answer, and the tokens that were read."""
    command = ["mtp-gguf", "serve", str(arguments.model), "--port", str(arguments.port)]
    command += ["-c", str(arguments.tokens + 2048), "-np", "1", "-t", str(arguments.threads)]
    if folder:
        command += ["--session-dir", str(folder)]
    prompt = [5 + n * n % 20_000 for n in range(arguments.tokens)]
    url = f"http://127.0.0.1:{arguments.port}"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        log = iter(process.stderr)
        if not any(line.startswith("ready") for line in log):
            raise SystemExit(f"the server ended: {' '.join(command)}")
        threading.Thread(target=lambda: [None for _ in log], daemon=True).start()
        began = time.perf_counter()
        timings = complete(url, prompt, 1)["timings"]
        seconds = time.perf_counter() - began
        process.send_signal(signal.SIGTERM)
        process.wait()
    return seconds, timings["prompt_n"]


def main() -> None:
    parser = options(__doc__, {"--tokens": 8192, "--threads": 2, "--rounds": 3, "--port": 18080})
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="for the session")
    arguments = parser.parse_args()
    folder = arguments.work / "restart"
    shutil.rmtree(folder, ignore_errors=True)
    first_token(arguments, folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    runs: dict[str, list[tuple[float, int]]] = {"without `--session-dir`": [], "with it": []}
    for _ in range(arguments.rounds):
        for name, place in zip(runs, (None, folder), strict=True):
            runs[name].append(first_token(arguments, place))
    shutil.rmtree(folder)
    print(f"session of {size / 1e6:.0f} MB\n")
    heading("after a restart", "seconds", "tokens read")
    for name, found in runs.items():
        row(name, f"{median(s for s, _ in found):.2f}", f"{found[0][1]:,}")


if __name__ == "__main__":
    main()
