"""A llama-server on the loopback interface that completes the benchmark's prompts."""

import http.client
import io
import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mtp_gguf.gguf_tools.errors import ServerError
from mtp_gguf.gguf_tools.files.json_text import parse_json
from mtp_gguf.server.launch import RunningServer

_ANSWER_SECONDS = 600.0


@dataclass(frozen=True)
class ServerRun:
    """What a server reports of one completion, without its first token, which the prompt yields."""

    tokens: int
    seconds: float
    drafted: int
    accepted: int


class BenchServer:
    """A llama-server that has loaded its model."""

    def __init__(self, port: int) -> None:
        self._port = port

    def complete(self, prompt: Sequence[int], n: int) -> ServerRun:
        """Complete a prompt greedily; ServerError if the server fails.

        A repetition penalty from the file's metadata is switched off: our sessions have none.
        """
        body = {"prompt": [*prompt], "n_predict": n, "temperature": 0, "cache_prompt": False}
        body["repeat_penalty"] = 1.0
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_ANSWER_SECONDS)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/completion", json.dumps(body), headers)
            answer = connection.getresponse()
            raw = answer.read()
            if answer.status != 200:
                raise ServerError(f"llama-server answered {answer.status}: {raw[:200]!r}")
            timings = parse_json(raw)["timings"]
            return ServerRun(
                max(0, int(timings["predicted_n"]) - 1),
                float(timings["predicted_ms"]) / 1e3,
                int(timings.get("draft_n", 0)),
                int(timings.get("draft_n_accepted", 0)),
            )
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise ServerError(f"llama-server gave no completion: {error!r}") from None
        finally:
            connection.close()


@contextmanager
def running(
    binary: Path,
    model: Path,
    *,
    depth: int,
    threads: int,
    n_ctx: int,
    gpu_layers: int,
    head: Path | None = None,
) -> Iterator[BenchServer]:
    """Run a server on a free loopback port; ServerError if it exits while loading."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [str(binary), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)]
    words += ["-np", "1", "-c", str(n_ctx), "-t", str(threads), "-tb", str(threads)]
    words += ["-ngl", str(gpu_layers)] if gpu_layers else []
    if depth:
        words += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(depth)]
        words += ["-md", str(head)] if head else []
    health = f"http://127.0.0.1:{port}/health"
    with RunningServer(words, health, io.BytesIO(), forward=False) as server:
        if not server.wait_until_ready(lambda _: None):
            server.wait()  # until all of its output is read
            last = server.last_lines() or ["no message"]
            raise ServerError(f"{binary}: ended while loading: {last[-1]}")
        yield BenchServer(port)
