"""llama-server's web page in a browser, and `serve --open`, which opens it."""

from __future__ import annotations

import io
import os
import signal
import time
import urllib.request
from pathlib import Path
from urllib.error import HTTPError

import pytest

from mtp_gguf.server.launch import RunningServer
from support.browser import Browser
from support.models import Files
from support.real_server import Server, busy_slots, opened
from support.serving import PATIENCE, serving, wait_for
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
    wait_for(lambda: browser.js("!!document.querySelector('textarea')"), "the page appears")
    browser.js("document.querySelector('textarea').focus()")
    browser.call("Input.insertText", text=QUESTION)
    wait_for(lambda: click(browser, "Send"), "a button sends it")


def text(browser: Browser) -> str:
    """What the page shows."""
    return str(browser.js("document.body.innerText"))


def test_a_chat(server: Server, files: Files, tmp_path: Path) -> None:
    with server.running(files("ids", "demo"), "--temp", 0) as client:
        url = skip_without_page(client.port)
        with Browser(tmp_path / "profile") as browser:
            ask(browser, url)
            wait_for(lambda: ANSWER in text(browser), "the page shows the answer")
            # llama-server does not end while it writes an answer whose page is gone.
            wait_for(lambda: not busy_slots(client.port), "the answer ends")


def test_an_answer_streams_and_stops(server: Server, files: Files, tmp_path: Path) -> None:
    """An answer without an end grows while it is generated, until it is stopped."""
    endless = ("--ignore-eos", "--ctx-size", LONGEST)
    with server.running(files("ids", "demo"), *endless) as client:
        url = skip_without_page(client.port)
        with Browser(tmp_path / "profile") as browser:
            ask(browser, url)
            lengths: list[int] = []

            def grew() -> bool:
                length = len(text(browser))
                if not lengths or length > lengths[-1]:
                    lengths.append(length)
                return len(lengths) > 3

            wait_for(grew, "the answer grows")
            wait_for(lambda: click(browser, "Stop generation"), "a button stops it")
            wait_for(lambda: not busy_slots(client.port), "the server stops")
            wait_for(lambda: button(browser, "Regenerate"), "the answer ends")


def test_a_closed_page_does_not_keep_the_server(
    patched_server: Path, files: Files, free_port: int
) -> None:
    """The header makes llama-server go on with the answer when the page is gone, until a signal."""
    port, log = free_port, io.BytesIO()
    options = ["--ignore-eos", "--ctx-size", str(LONGEST), "--port", str(port), "-t", "1"]
    command = [str(patched_server), "-m", str(files("ids", "demo")), *options, "--no-warmup"]
    body = {"messages": [{"role": "user", "content": QUESTION}], "stream": True}
    with RunningServer(command, f"http://127.0.0.1:{port}/health", log) as run:
        assert run.wait_until_ready(lambda _: None)
        header = {"X-Conversation-Id": "a"}
        with opened(port, "/v1/chat/completions", body, header) as answer:
            assert answer.readline()
        time.sleep(0.5)  # in which it notices that nobody reads
        assert busy_slots(port)
        os.kill(os.getpid(), signal.SIGINT)
        assert run.wait() == 0
    assert b"sent it again" not in log.getvalue()


def test_open_tells_the_browser(
    server: Server, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {told}\n', encoding="utf-8")
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(browser))
    with server.running(files("ids", "demo"), options=["--open"]) as client:
        url = skip_without_page(client.port)
        wait_for(lambda: told.exists() and told.read_text("utf-8") == f"{url}\n")


def test_open_says_that_there_is_no_page(files: Files, tmp_path: Path, free_port: int) -> None:
    program = write_stand_in(tmp_path / "server", PATCHED_HELP)
    with serving(program, files("ids"), free_port, options=["--open"]) as run:
        run.until("this llama-server has no web page; `mtp-gguf build-server` builds one")
