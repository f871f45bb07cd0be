"""A headless Chromium that tests talk to through a pipe, in its DevTools protocol.

Nothing to install beside the browser itself: messages are JSON, each ended by a zero byte, on the
descriptors 3 and 4 of a browser started with --remote-debugging-pipe.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_APPLE = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
_PATIENCE = 120.0  # seconds; a loaded machine starts a browser slowly
# What a key press is to a page: its code, and the text that it types.
_KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), " ": (32, " "), "ArrowRight": (39, "")}


def find_browser() -> str:
    """The path of a Chromium; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None and _APPLE.exists():
        found = str(_APPLE)
    if found is None:
        pytest.skip("no Chromium on the PATH")
    return found


class Browser:
    """One tab of a browser of its own. Use `with`."""

    def __init__(self, profile: Path) -> None:
        """profile: a new folder for its data."""
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        words = [find_browser(), *options, f"--user-data-dir={profile}", "about:blank"]
        redirected = f"exec {shlex.join(words)} 3<&{theirs_in} 4>&{theirs_out}"
        self._process = subprocess.Popen(
            ["bash", "-c", redirected],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._read = b""
        self._sent = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its helpers as well
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to one command of the protocol."""
        self._sent += 1
        message = {"id": self._sent, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        raw = json.dumps(message).encode() + b"\0"
        while raw:
            raw = raw[os.write(self._out, raw) :]
        while True:
            answer = json.loads(self._next_message())
            if answer.get("id") == self._sent:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _next_message(self) -> bytes:
        until = time.monotonic() + _PATIENCE
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], until - time.monotonic())
            assert ready, "the browser does not answer"
            piece = os.read(self._in, 1 << 20)
            assert piece, "the browser ended"
            self._read += piece
        message, _, self._read = self._read.partition(b"\0")
        return message

    def open(self, page: Path, width: int, height: int = 900, **media: str) -> None:
        """Show a page at a width. media: features such as prefers_color_scheme="dark"."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": k.replace("_", "-"), "value": v} for k, v in media.items()]
        self.call("Emulation.setEmulatedMedia", media="", features=features)
        self.call("Page.navigate", url=page.as_uri())
        while (
            self.js("document.readyState") != "complete"
            or self.js("location.href") != page.as_uri()
        ):
            time.sleep(0.02)

    def js(self, expression: str) -> Any:
        """The value of an expression in the page."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key, as from a keyboard: it moves the focus, scrolls, types."""
        code, text = _KEYS[key]
        named = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.call(
            "Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **named
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def picture(self, *, whole: bool = False) -> bytes:
        """What is seen as PNG; whole: all of the page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])
