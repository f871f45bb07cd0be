"""How often llama-server's draft-mtp accepts the drafts of a GGUF's MTP head.

    python acceptance.py /path/to/llama-server demo-f16.gguf

Starts the server on the loopback address, asks for a completion of each prompt, and prints one line
of JSON per depth and temperature. `first_draft` is measured with one draft token a cycle, where
accepted / drafted is the chance that the first draft is right.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_SECONDS = 120
REQUEST_SECONDS = 120

# Half of the primer's kind, with names it has (robots) and has not (planets); half of the library's
# and of nobody's.
QUESTIONS = (
    "What does os.path.join do?",
    "How do I use argparse.ArgumentParser.add_argument?",
    "Explain collections.OrderedDict.",
    "What is contextlib.contextmanager for?",
    "Tell me about the with statement.",
    "Explain threading.Lock.",
    "Write a Python function that reads the lines of a file.",
    "Write a Python function that counts the robots.",
    "Show me a Python function that finds a ticket by its name.",
    "Write a function that sorts the planets by size.",
    "Write a Python function read_lines(path).",
    "What does the Python reference say about lambda?",
)
BEGINNINGS = (
    "import json\nimport sys\n",
    "class Stack:\n    def __init__(self):\n",
    "class Planet:\n",
    "def fibonacci(n):\n",
    "def total_price(books):\n",
    "def is_prime(n):\n",
    '"""Functions for rivers."""\n',
    "# Planets\n\n",
    "import os\nimport sys\n\ndef main():\n",
    "def parse_args(args=None):\n    parser = argparse.",
    "try:\n    import json\nexcept ImportError:\n",
    "The if statement is used for",
)
PROMPTS = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]
PROMPTS += BEGINNINGS


def free_port() -> int:
    """A port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(binary: Path, model: Path, depth: int, threads: int) -> Iterator[str]:
    """A running llama-server that drafts `depth` tokens a cycle; yields its address."""
    port = free_port()
    command = [str(binary), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += ["-c", "1024", "-np", "1", "-t", str(threads), "-tb", str(threads)]
    command += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(depth)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
                    if answer.status == 200:
                        break
            except (urllib.error.URLError, ConnectionError):
                pass
            if process.poll() is not None:
                raise RuntimeError(f"llama-server ended with {process.returncode}: {command}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"llama-server not ready after {START_SECONDS} s")
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def complete(address: str, prompt: str, tokens: int, temperature: float, seed: int) -> Any:
    """The server's answer to one completion of up to `tokens` tokens."""
    body = {
        "prompt": prompt,
        "n_predict": tokens,
        "temperature": temperature,
        "seed": seed,
        "cache_prompt": False,
    }
    request = urllib.request.Request(
        f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
        return json.load(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("server", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--texts", type=Path, help="append the generated texts to this file")
    args = parser.parse_args()
    for depth in args.depths:
        with server(args.server, args.model, depth, args.threads) as address:
            for temperature in args.temperatures:
                drafted = accepted = made = 0
                for seed, prompt in enumerate(PROMPTS, start=1):
                    answer = complete(address, prompt, args.tokens, temperature, seed)
                    drafted += answer["timings"].get("draft_n", 0)
                    accepted += answer["timings"].get("draft_n_accepted", 0)
                    made += answer["tokens_predicted"]
                    if args.texts:
                        with args.texts.open("a") as file:
                            print(f"--- {temperature}\n{prompt}|||{answer['content']}", file=file)
                result: dict[str, object] = {
                    "model": args.model.name,
                    "depth": depth,
                    "temperature": temperature,
                    "prompts": len(PROMPTS),
                    "tokens": made,
                    "drafted": drafted,
                    "accepted": accepted,
                    "accepted_share": round(accepted / max(1, drafted), 4),
                }
                if depth == 1:
                    result["first_draft"] = result["accepted_share"]
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
