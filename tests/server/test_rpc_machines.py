"""A model over two RPC servers in network namespaces, which are as good as machines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from support import device_calls, preloading
from support.models import Files
from support.real_server import PROMPTS, Server, check_two_machines, listens, rpc_server
from support.serving import wait_for

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="namespaces are Linux's"),
]

# Addresses for benchmarks (RFC 2544), which no network routes.
NETWORKS = ("198.18.71", "198.18.72")
PORT = 50052


def ip(*words: str) -> None:
    """Run ip(8); skips the test where it is not there or not allowed."""
    if shutil.which("ip") is None:
        pytest.skip("no ip(8) to make network namespaces with")
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"network namespaces are not permitted: ip {words[0]}: {done.stderr.strip()}")


@contextmanager
def machine(number: int, program: Path) -> Iterator[str]:
    """An RPC server in a namespace, tied to this one by a cable; its endpoint."""
    name, cable = f"mtp{os.getpid()}n{number}", f"mtp{os.getpid() % 10**6}c{number}"
    network = NETWORKS[number]
    inside, threads = ["ip", "netns", "exec", name], ["--threads", "1"]
    with ExitStack() as stack:
        ip("netns", "add", name)
        stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        ip("link", "add", cable, "type", "veth", "peer", "name", "inner", "netns", name)
        stack.callback(subprocess.run, ["ip", "link", "del", cable], check=False)
        ip("address", "add", f"{network}.1/30", "dev", cable)
        ip("link", "set", cable, "up")
        ip("-n", name, "address", "add", f"{network}.2/30", "dev", "inner")
        ip("-n", name, "link", "set", "inner", "up")
        process = stack.enter_context(
            subprocess.Popen(
                [*inside, program, "--host", f"{network}.2", "--port", str(PORT), *threads],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )
        stack.callback(process.kill)
        wait_for(lambda: listens(f"{network}.2", PORT))
        yield f"{network}.2:{PORT}"


@pytest.mark.sample(1)
@pytest.mark.parametrize("driver", ["--spec-draft-fused", "--no-spec-draft-fused"])
def test_two_machines_hold_the_model_and_the_text_is_the_same(
    driver: str, server: Server, files: Files
) -> None:
    """The head goes to the last device, where the model's last layer is."""
    model, program = files("ids", "demo"), server.program.with_name("ggml-rpc-server")
    with machine(0, program) as one, machine(1, program) as two:
        text = check_two_machines(server, model, (one, two), driver)
    assert ("tokens in one graph on RPC1" in text) == (driver == "--spec-draft-fused"), text


def test_a_device_is_busy_for_a_part_of_the_time(
    server: Server, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As device_calls.c measures it, of the device that an RPC server is."""
    written, model = tmp_path / "counts.txt", files("ids", "demo")
    with rpc_server(server.program) as machine:
        monkeypatch.setenv("DEVICE_CALLS", str(written))
        monkeypatch.setenv("LD_PRELOAD", str(preloading.build("device_calls", tmp_path)))
        options, began = ("--rpc", machine, "-ngl", 99), time.perf_counter_ns()
        with server.running(model, options=options) as client:
            client.complete(PROMPTS[0], n_predict=16)
        ns = time.perf_counter_ns() - began
    found = [(row["busy_least"], row["busy_most"]) for row in device_calls.read_counts(written)]
    assert found == sorted(found)
    assert 0 < found[-1][0] < found[-1][1] < ns
