"""Runs a real llama-server with a tiny model, sends requests and reads its log."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from mtp_gguf.gguf_tools.heads.fastmtp import ID_MAP_TENSOR, IDS_KEY
from support.serving import PATIENCE, Serving, serving

PROMPTS = [[5, 6, 7, 8], [9] * 17, list(range(40, 140)), [700, 3, 700, 3, 700]]
TEXTS = [
    "def is_prime(n):\n",
    "import os\n\nclass Path:\n",
    "    if name is None:\n",
    "class Path:\n    def ",
    "for name in names:\n",
    "Return the ",
    "import sys\n\ndef main():\n    ",
    "try:\n    import json\n",
]
NEAR_TIE = 0.1  # of two logarithms of probabilities; rounding was seen to turn 0.026
LEAST_ACCEPTED = 0.2  # of what the demo model's head offers; far below what it reaches
TOKENS = 24
DEPTH = 3
TIMEOUT = 600  # seconds; a software GPU takes minutes for its first tokens
SETTINGS = ("--no-repack", "--ctx-size", 2048, "--no-warmup", "--threads", 1)
VOCABULARY, LISTED = 1024, 256
STEPS = "--no-spec-draft-fused"


@contextmanager
def rpc_server(folder: Path, port: int) -> Iterator[str]:
    """An RPC server on this machine, of the build in `folder`; its endpoint."""
    program = str(folder / "ggml-rpc-server")
    command = [program, "--host", "127.0.0.1", "--port", str(port), "-t", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                with suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                time.sleep(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def post(port: int, path: str, body: Any) -> tuple[int, Any]:
    """The status and the JSON of what the server at `port` answers."""
    url = f"http://127.0.0.1:{port}{path}"
    request = urllib.request.Request(url, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


class Client:
    """Asks a running server at `port`."""

    def __init__(self, run: Serving, port: int) -> None:
        self.run = run
        self.url = f"http://127.0.0.1:{port}/completion"

    def complete(self, prompt: str | Sequence[int], **options: Any) -> dict[str, Any]:
        """Continue `prompt` (text or token ids) greedily, deaf to the end of text.

        options: of the request, and the API `key`.
        """
        key = options.pop("key", None)
        body = {
            "prompt": prompt,
            "n_predict": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_tokens": True,
            **options,
        }
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            result: dict[str, Any] = json.load(answer)
        assert len(result["tokens"]) == body["n_predict"]
        return result


@contextmanager
def running(
    server: Path, model: Path, port: int, *passed: object, options: Sequence[object] = ()
) -> Iterator[Client]:
    """A server that is ready, stopped as a user would stop it."""
    with serving(server, model, port, *SETTINGS, *passed, options=options) as run:
        run.until("ready")
        yield Client(run, port)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 0


def answers(
    server: Path,
    model: Path,
    port: int,
    prompts: Sequence[str | Sequence[int]],
    *passed: object,
    options: Sequence[object] = (),
    slots: int = 0,
    **request: Any,
) -> list[dict[str, Any]]:
    """What a server of its own answers: to one prompt after the other, or `slots` at once."""
    passed += ("--parallel", slots) if slots else ()
    with (
        running(server, model, port, *passed, options=options) as client,
        ThreadPoolExecutor(slots or 1) as pool,
    ):
        return list(pool.map(lambda prompt: client.complete(prompt, **request), prompts))


def tokens_of(results: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The text of each answer."""
    return [result["tokens"] for result in results]


def drafts_of(results: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Drafts offered and accepted in all answers."""
    drafting = [counts(result) for result in results if "draft_n" in result["timings"]]
    offered, accepted = (sum(column) for column in zip((0, 0), *drafting, strict=True))
    return offered, accepted


def check_beginnings(want: Sequence[list[int]], results: Sequence[dict[str, Any]]) -> None:
    """Each answer begins with the tokens wanted: those of `certain`."""
    for tokens, result in zip(want, results, strict=True):
        assert result["tokens"][: len(tokens)] == tokens


def check_two_machines(
    server: Path, model: Path, port: int, folder: Path, machines: tuple[str, str], *passed: object
) -> str:
    """The text stays with drafts where two RPC servers hold the model; the log with drafts."""
    texts: list[list[list[int]]] = []
    for draft in (["--no-draft"], ["--spec-draft-n-max", DEPTH]):
        log = folder / f"log{len(texts)}"
        options = ["--rpc", ",".join(machines), *draft]
        logged = (*passed, "-ngl", 99, "--log-file", log, "--verbosity", 4)
        texts.append(tokens_of(answers(server, model, port, PROMPTS, *logged, options=options)))
        said = log.read_text(errors="replace")
        for machine in machines:
            assert re.search(rf"{machine}.* model buffer size", said)
    assert texts[0] == texts[1]
    return said


def post_text(port: int, path: str, body: str) -> tuple[int, str]:
    """Status and text of an answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request("POST", path, body)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def refusal(server: Path, *arguments: object) -> str:
    """What a server says that must end while it loads."""
    command = [server, *arguments, "--port", 1, *SETTINGS]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode not in (0, -signal.SIGSEGV, -signal.SIGABRT), done.stderr[-2000:]
    return done.stdout + done.stderr


def beside(model: Path, head: Path, folder: Path) -> Path:
    """A model with its head in another file, as publishers ship them."""
    shutil.copy(head, folder / "mtp-model.gguf")
    return Path(shutil.copy(model, folder / "model.gguf"))


def listed_ids(path: Path) -> set[int]:
    """The draft vocabulary of a file."""
    reader = GGUFReader(path)
    field = reader.get_field(IDS_KEY)
    if field is not None:
        return set(field.contents())
    return {int(i) for t in reader.tensors if t.name == ID_MAP_TENSOR for i in t.data}


def drafted(log: Path) -> list[int]:
    """The token that each step of drafting chose, from a log at the highest verbosity."""
    return drafted_in(log.read_text(errors="replace"))


def drafted_in(log: str) -> list[int]:
    """As `drafted`, from the text of a log."""
    return [int(token) for token in re.findall(r"draft candidate +0, pos +\d+: +(\d+)", log)]


def certain(result: dict[str, Any]) -> list[int]:
    """The tokens up to the first that was almost another one; asks for `n_probs=2`.

    Several slots share a batch, and a stock server without drafting, too, rounds differently in
    it: enough to turn such a token, and with it all that follows.
    """
    for place, token in enumerate(result["completion_probabilities"]):
        first, second = (top["logprob"] for top in token["top_logprobs"])
        if first - second < NEAR_TIE:
            return list(result["tokens"][:place])
    return list(result["tokens"])


def counts(result: dict[str, Any]) -> tuple[int, int]:
    """Drafts offered and accepted."""
    return result["timings"]["draft_n"], result["timings"]["draft_n_accepted"]
