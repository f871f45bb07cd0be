"""llama-server's web page in a browser, and `serve --open`, which opens it."""

from __future__ import annotations

import io
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError

import pytest

from mtp_gguf.server.launch import RunningServer
from support.browser import Browser
from support.models import Files
from support.real_server import running
from support.serving import PATIENCE, serving
from support.stand_in_server import PATCHED_HELP, write_stand_in

pytestmark = pytest.mark.server

QUESTION = "def is_prime(n):"
ANSWER = "return"  # what any Python has that the demo model writes
LONGEST = 1 << 17  # tokens, for which the demo model takes a minute


def skip_without_page(port: int) -> str:
    """The address of the page; skips the test if the server that runs has none."""
    url = f"http://127.0.0.1:{port}/"
    request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
    try:
        urllib.request.urlopen(request, timeout=PATIENCE).close()
    except HTTPError as error:
        error.close()
        pytest.skip("this llama-server has no web page: npm was missing when it was built")
    return url


def wait_for(condition: Callable[[], object], what: str) -> None:
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, f"the page does not {what}"
        time.sleep(0.05)


def button(browser: Browser, name: str, action: str = "") -> bool:
    """Whether the page has a button of this name that can be used; .click() is an action."""
    found = browser.js(
        "(() => { const found = [...document.querySelectorAll('button')].find("
        f"b => [b.ariaLabel, b.innerText.trim()].includes({name!r}) && !b.disabled);"
        f"found?{action or '.name'}; return !!found }})()"
    )
    return bool(found)


def click(browser: Browser, name: str) -> bool:
    """Click the button of this name; False if there is none."""
    return button(browser, name, ".click()")


def ask(browser: Browser, url: str) -> None:
    """Open the page and send the question as a user does."""
    browser.call("Page.navigate", url=url)
    wait_for(lambda: browser.js("!!document.querySelector('textarea')"), "appear")
    browser.js("document.querySelector('textarea').focus()")
    browser.call("Input.insertText", text=QUESTION)
    wait_for(lambda: click(browser, "Send"), "send")


def text(browser: Browser) -> str:
    """What the page shows."""
    return str(browser.js("document.body.innerText"))


def test_a_chat(patched_server: Path, files: Files, tmp_path: Path, free_port: int) -> None:
    with running(patched_server, files("ids", "demo"), free_port, "--temp", 0):
        url = skip_without_page(free_port)
        with Browser(tmp_path / "profile") as browser:
            ask(browser, url)
            wait_for(lambda: ANSWER in text(browser), "show the answer")
            # llama-server does not end while it writes an answer whose page is gone.
            wait_for(lambda: not generating(url), "end the answer")


def test_an_answer_streams_and_stops(
    patched_server: Path, files: Files, tmp_path: Path, free_port: int
) -> None:
    """An answer without an end grows while it is generated, until it is stopped."""
    endless = ("--ignore-eos", "--ctx-size", LONGEST)
    with running(patched_server, files("ids", "demo"), free_port, *endless):
        url = skip_without_page(free_port)
        with Browser(tmp_path / "profile") as browser:
            ask(browser, url)
            lengths: list[int] = []

            def grew() -> bool:
                length = len(text(browser))
                if not lengths or length > lengths[-1]:
                    lengths.append(length)
                return len(lengths) > 3

            wait_for(grew, "stream")
            wait_for(lambda: click(browser, "Stop generation"), "stop")
            wait_for(lambda: not generating(url), "stop the server")
            wait_for(lambda: button(browser, "Regenerate"), "end the answer")


def generating(url: str) -> bool:
    """Whether the server generates at the moment."""
    with urllib.request.urlopen(f"{url}slots", timeout=PATIENCE) as answer:
        return any(slot["is_processing"] for slot in json.load(answer))


def test_a_closed_page_does_not_keep_the_server(
    patched_server: Path, files: Files, free_port: int
) -> None:
    """The header makes llama-server go on with the answer when the page is gone, until a signal."""
    url, log = f"http://127.0.0.1:{free_port}", io.BytesIO()
    options = ["--ignore-eos", "--ctx-size", str(LONGEST), "--port", str(free_port), "-t", "1"]
    command = [str(patched_server), "-m", str(files("ids", "demo")), *options, "--no-warmup"]
    body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True}
    with RunningServer(command, f"{url}/health", log) as run:
        assert run.wait_until_ready(lambda _: None)
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"X-Conversation-Id": "a", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            assert answer.readline()
        time.sleep(0.5)  # in which it notices that nobody reads
        assert generating(f"{url}/")
        os.kill(os.getpid(), signal.SIGINT)
        assert run.wait() == 0
    assert b"sent it again" not in log.getvalue()


def test_open_tells_the_browser(
    patched_server: Path,
    files: Files,
    tmp_path: Path,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n', encoding="utf-8")
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(browser))
    with running(patched_server, files("ids", "demo"), free_port, options=["--open"]):
        skip_without_page(free_port)
        wait_for(opened.exists, "open")
        wait_for(lambda: opened.read_text("utf-8") == f"http://127.0.0.1:{free_port}/\n", "open")


def test_open_says_that_there_is_no_page(files: Files, tmp_path: Path, free_port: int) -> None:
    server = write_stand_in(tmp_path / "server", PATCHED_HELP)
    with serving(server, files("ids"), free_port, options=["--open"]) as run:
        run.until("this llama-server has no web page; `mtp-gguf build-server` builds one")
