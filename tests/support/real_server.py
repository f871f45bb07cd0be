"""Runs a real llama-server with a tiny model, sends requests and reads its log."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from gguf import GGUFReader

from mtp_gguf.gguf_tools.heads.fastmtp import ID_MAP_TENSOR, IDS_KEY
from support.models import Files
from support.ports import free_port
from support.serving import Serving, serving, wait_for

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
def rpc_server(program: Path) -> Iterator[str]:
    """An RPC server on this machine, of the same build as the program; its endpoint."""
    port = free_port()
    command = [str(program.with_name("ggml-rpc-server")), "--host", "127.0.0.1"]
    with subprocess.Popen(
        [*command, "--port", str(port), "-t", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            wait_for(lambda: listens("127.0.0.1", port))
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def listens(host: str, port: int) -> bool:
    """Whether something listens there."""
    with suppress(OSError):
        socket.create_connection((host, port), 1).close()
        return True
    return False


Headers = Mapping[str, str] | None


def opened(
    port: int, path: str, body: Any = None, headers: Headers = None, timeout: float = TIMEOUT
) -> Any:
    """The answer of the server at `port`, to be read: to a GET, or to `body`, JSON or its text."""
    text = body if isinstance(body, str) else json.dumps(body)
    data = None if body is None else text.encode()
    sent = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, sent)
    return urllib.request.urlopen(request, timeout=timeout)


def post(port: int, path: str, body: Any, headers: Headers = None) -> tuple[int, Any]:
    """The status and the JSON of what the server at `port` answers."""
    try:
        with opened(port, path, body, headers) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def is_healthy(port: int) -> bool:
    """Whether the server at `port` answers already."""
    with suppress(OSError), opened(port, "/health"):
        return True
    return False


def busy_slots(port: int) -> int:
    """How many slots of the server at `port` are at work."""
    with opened(port, "/slots") as answer:
        return sum(slot["is_processing"] for slot in json.load(answer))


def chunks_of(answer: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The parts of a streamed answer, as they come."""
    return (json.loads(line[6:]) for line in answer if line.startswith(b"data: {"))


class Client:
    """Asks a running server at `port`."""

    def __init__(self, run: Serving, port: int, log: Path | None = None) -> None:
        self.run = run
        self.port = port
        self._log = log

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
        with opened(self.port, "/completion", body, headers) as answer:
            result: dict[str, Any] = json.load(answer)
        assert len(result["tokens"]) == body["n_predict"]
        return result

    def log(self) -> str:
        """What a server that is `verbose` has written; it quotes tokens, and those are bytes."""
        assert self._log
        return self._log.read_text("utf-8", "replace")

    def processes(self) -> list[psutil.Process]:
        """The llama-server, as long as it runs."""
        return psutil.Process(self.run.process.pid).children()

    def kill(self) -> None:
        """Kill the llama-server at once, as kill -9 does."""
        for process in self.processes():
            process.kill()
        assert self.run.end() != 0


@contextmanager
def running(
    server: Path, model: Path, port: int, *passed: object, options: Sequence[object] = ()
) -> Iterator[Client]:
    """A server that is ready, stopped as a user would stop it."""
    with serving(server, model, port, *SETTINGS, *passed, options=options) as run:
        run.until("ready")
        yield Client(run, port)
        stop(run)


def stop(run: Serving) -> None:
    """Stop a server as a user would."""
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0


class Server:
    """A llama-server that tests start, each time at another port."""

    def __init__(self, program: Path, folder: Path) -> None:
        """folder: for the logs."""
        self.program = program
        self._logs = (folder / str(number) for number in itertools.count())

    @contextmanager
    def started(
        self, model: Path, *passed: object, options: Sequence[object] = (), verbose: bool = False
    ) -> Iterator[Client]:
        """A server that is ready. verbose: it logs all that it can, for `Client.log`."""
        port, log = free_port(), next(self._logs) if verbose else None
        if log:
            passed = (*passed, "--log-file", log, "--verbosity", 10)
        with serving(self.program, model, port, *SETTINGS, *passed, options=options) as run:
            run.until("ready")
            yield Client(run, port, log)

    @contextmanager
    def running(self, model: Path, *passed: object, **how: Any) -> Iterator[Client]:
        """As `started`, and stopped as a user would stop it."""
        with self.started(model, *passed, **how) as client:
            yield client
            stop(client.run)

    @contextmanager
    def router(self, models: Path, *passed: object) -> Iterator[int]:
        """The port of a server that starts others, for the models of a folder."""
        command = [self.program, "--models-dir", models, "--port", port := free_port(), *SETTINGS]
        words = [str(word) for word in (*command, *passed)]
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(words, **quiet) as process:
            try:
                wait_for(lambda: is_healthy(port))
                yield port
            finally:
                process.send_signal(signal.SIGINT)

    def answers(
        self,
        model: Path,
        prompts: Sequence[str | Sequence[int]],
        *passed: object,
        options: Sequence[object] = (),
        slots: int = 0,
        **request: Any,
    ) -> list[dict[str, Any]]:
        """What a server of its own answers: to one prompt after the other, or `slots` at once."""
        passed += ("--parallel", slots) if slots else ()
        with self.running(model, *passed, options=options) as client:
            return at_once(client, prompts, slots or 1, **request)


def at_once(
    client: Client, prompts: Sequence[str | Sequence[int]], slots: int, **request: Any
) -> list[dict[str, Any]]:
    """The answers to several prompts, so many at a time."""
    with ThreadPoolExecutor(slots) as pool:
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
    server: Server, model: Path, machines: tuple[str, str], *passed: object
) -> str:
    """The text stays with drafts where two RPC servers hold the model; the log with drafts."""
    texts: list[list[list[int]]] = []
    for draft in (["--no-draft"], ["--spec-draft-n-max", DEPTH]):
        options = ["--rpc", ",".join(machines), *draft]
        with server.running(model, *passed, "-ngl", 99, options=options, verbose=True) as client:
            texts.append(tokens_of(at_once(client, PROMPTS, 1)))
        for machine in machines:
            assert re.search(rf"{machine}.* model buffer size", client.log())
    assert texts[0] == texts[1]
    return client.log()


def refusal(program: Path, *arguments: object) -> str:
    """What a server says that must end while it loads."""
    command = [program, *arguments, "--port", 1, *SETTINGS]
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode not in (0, -signal.SIGSEGV, -signal.SIGABRT), done.stderr[-2000:]
    return done.stdout + done.stderr


def beside(model: Path, head: Path, folder: Path) -> Path:
    """A model with its head in another file, as publishers ship them."""
    shutil.copy(head, folder / "mtp-model.gguf")
    return Path(shutil.copy(model, folder / "model.gguf"))


def in_layout(files: Files, layout: str, spec: str | Path, folder: Path) -> Path:
    """A model with a head in this layout, beside it if that is a file of its own."""
    if layout in ("head", "sidecar"):
        return beside(files("base", spec), files(layout, spec), folder)
    return files(layout, spec)


def listed_ids(path: Path) -> set[int]:
    """The draft vocabulary of a file."""
    reader = GGUFReader(path)
    field = reader.get_field(IDS_KEY)
    if field is not None:
        return set(field.contents())
    return {int(i) for t in reader.tensors if t.name == ID_MAP_TENSOR for i in t.data}


def drafted(log: str) -> list[int]:
    """The token that each step of drafting chose, from a log at the highest verbosity."""
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
