"""llama-server and our session, interleaved, on a tiny model with a known acceptance rate."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.bench import run as run_module
from mtp_gguf.bench import server_comparison
from mtp_gguf.bench.interleaved import InterleavedRuns
from mtp_gguf.bench.model import BenchModel
from mtp_gguf.bench.options import BenchOptions
from mtp_gguf.bench.run import run_bench
from mtp_gguf.bench.server import BenchServer
from mtp_gguf.cli.bench_table import bench_table
from mtp_gguf.gguf_tools.errors import ServerError
from mtp_gguf.server.find import LlamaServer, ask, find_server

ROUNDS = 3


@pytest.fixture(scope="module")
def server() -> LlamaServer:
    try:
        return ask(find_server(None))
    except ServerError as error:
        pytest.skip(str(error))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the server and our session do, in order; both really run."""
    seen: list[str] = []

    def noted(owner: type, name: str, event: str) -> None:
        real = getattr(owner, name)

        def method(self: Any, *args: Any, **named: Any) -> Any:
            seen.append(event)
            return real(self, *args, **named)

        monkeypatch.setattr(owner, name, method)

    noted(BenchServer, "complete", "server")
    noted(InterleavedRuns, "round", "ours")
    noted(BenchModel, "__exit__", "our model is closed")
    return seen


def options(server: LlamaServer, **changes: Any) -> BenchOptions:
    small = {"kinds": ["code"], "depths": (0, 1), "server_depths": (1,), "tokens": 24}
    small |= {"threads": 1, "prompts": 1, "rounds": ROUNDS, "servers": [server]}
    return BenchOptions(**{**small, **changes})


@pytest.mark.thorough
def test_rounds_alternate(dial: Any, server: LlamaServer, events: list[str]) -> None:
    result = run_bench(dial("tiny", hit=0.7), options(server, server_depths=(0, 1)))
    drafting = next(s for s in result.servers if s.depth == 1)
    plain = next(s for s in result.servers if s.depth == 0)
    assert not drafting.note
    assert not plain.note
    # A short completion to warm up, then rounds that start with the one and the other alternately.
    rounds = ["server", "ours", "ours", "server", "server", "ours"]
    assert events == ["ours"] * ROUNDS + 2 * ["server", *rounds] + ["our model is closed"]
    for found in (plain, drafting):
        assert found.tok_s is not None
        assert found.ours is not None
        assert found.times is not None
        assert found.tok_s.n == found.ours.n == found.times.n == ROUNDS
        # Of three rounds the extremes are kept: ours over theirs can lie no further apart.
        assert found.ours.low / found.tok_s.high <= found.times.low <= found.times.high
        assert found.times.high <= found.ours.high / found.tok_s.low
    # The same prompt: as many drafts right as ours.
    assert plain.acceptance is None
    ours = next(t for t in result.texts if t.kind == "all" and t.depth == 1)
    assert drafting.acceptance == pytest.approx(ours.acceptance[0], abs=0.05)
    lines = list(bench_table(result))
    at = lines.index("llama-server, interleaved with MTPLlama at the same depth")
    assert lines[at + 2] == result.servers[0].name
    assert [line.split()[0] for line in lines[at + 3 : at + 5]] == ["0", "1"]
    assert f"{drafting.times and drafting.times.median:.2f}" in lines[at + 4].split()


@pytest.mark.thorough
def test_alone_where_two_do_not_fit(
    dial: Any, server: LlamaServer, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_comparison, "free_memory", lambda: 900_000)
    result = run_bench(dial("tiny", hit=0.7), options(server))
    assert events == ["ours"] * ROUNDS + ["our model is closed"] + ["server"] * (1 + ROUNDS)
    (found,) = result.servers
    assert found.tok_s is not None
    assert found.ours is found.times is None
    assert {part.state for part in result.plan} == {"done"}
    assert any("measured alone: both do not fit" in line for line in bench_table(result))


@pytest.mark.thorough
def test_server_that_exits_next_to_our_session_is_measured_alone(
    dial: Any, server: LlamaServer, events: list[str], tmp_path: Path
) -> None:
    """As one does whose GPU has no memory for two copies."""
    first = tmp_path / "first"
    script = tmp_path / "llama-server"
    script.write_text(
        f"#!/bin/sh\n[ -e {first} ] || {{ touch {first}; echo no memory; exit 1; }}\n"
        f'exec {server.path} "$@"\n'
    )
    script.chmod(0o755)
    (found,) = run_bench(
        dial("tiny", hit=0.7), options(replace(server, path=script), rounds=1)
    ).servers
    assert not found.note
    assert found.tok_s is not None
    assert found.ours is None
    assert events == ["ours", "our model is closed", "server", "server"]
    script.write_text("#!/bin/sh\necho no memory\nexit 1\n")
    (found,) = run_bench(
        dial("tiny", hit=0.7), options(replace(server, path=script), rounds=1)
    ).servers
    assert found.note == f"{script}: ended while loading: no memory"
    assert found.tok_s is None


def test_ctrl_c_while_a_server_is_up(
    dial: Any, server: LlamaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted while our session generates: results are kept and the server is stopped."""
    up: list[BenchServer] = []
    real = server_comparison.interleave

    def interrupted(*args: Any, **named: Any) -> Any:
        up.append(args[2])
        monkeypatch.setattr(InterleavedRuns, "round", _interrupt)
        return real(*args, **named)

    monkeypatch.setattr(run_module, "interleave", interrupted)
    result = run_bench(dial("tiny", hit=0.7), options(server))
    assert result.state == "stopped"
    assert result.texts
    assert not result.servers
    with pytest.raises(ServerError, match="gave no completion"):
        up[0].complete([1, 2], 2)


def _interrupt(_runs: InterleavedRuns, _step: Any = None) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
