"""A headless Chromium for tests of pages, driven over its debugging pipe: no driver, no port, no package.

    with opened_browser() as browser:
        page = browser.open(path.as_uri(), width=360)
        assert page.evaluate("document.title") == "a page"

The protocol is Chrome's own, https://chromedevtools.github.io/devtools-protocol/:
JSON messages, each ended by a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE_S = 60
FLAGS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
        "--disable-sync",
    ),
    *("--disable-background-networking", "--disable-component-update", "--disable-default-apps"),
    *("--disable-extensions", "--remote-debugging-pipe"),
)


def browser_program() -> str:
    """Chromium's path; skips the test, loudly, where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"NO BROWSER: none of {', '.join(NAMES)} is installed, so no page was looked at")
    return found


_STARTER = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads commands from descriptor 3 and answers on 4, which may be anybody's in this process."""


@contextmanager
def opened_browser() -> Iterator[Browser]:
    """A browser with a profile of its own, closed with everything it started."""
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        ends = [str(to_browser), str(from_browser)]
        process = subprocess.Popen(
            [sys.executable, "-c", _STARTER, *ends, browser_program(), *FLAGS, f"--user-data-dir={profile}"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Browser(commands, answers)
        finally:
            os.close(commands)
            os.close(answers)
            process.kill()
            process.wait()


class Browser:
    """Sends commands and collects what the browser tells by itself."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._last = 0
        self.events: list[dict[str, Any]] = []

    def open(self, address: str, *, width: int, height: int = 900, dark: bool = False) -> Page:
        """The page in a window of that many CSS pixels, loaded."""
        target = self.ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.ask("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.ask(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        page.ask("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.ask("Emulation.setEmulatedMedia", {"features": [scheme]})
        page.ask("Page.navigate", {"url": address})
        self.wait_for("Page.loadEventFired", session)
        return page

    def ask(self, method: str, params: dict[str, Any] | None = None, *, session: str = "") -> dict[str, Any]:
        """The result of one command; raises RuntimeError with the browser's own words where it refuses."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": params or {}}
        if session:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                break
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def wait_for(self, method: str, session: str) -> None:
        """Until the browser has told `method` in that session."""
        while not any(
            event.get("method") == method and event.get("sessionId") == session for event in self.events
        ):
            self.events.append(self._next())

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0, until - time.monotonic()))
            read = os.read(self._answers, 1 << 20) if ready else b""
            if not read:
                raise RuntimeError("the browser doesn't answer")
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def ask(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """One command for this tab."""
        return self._browser.ask(method, params, session=self._session)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, which the page's own security policy doesn't concern."""
        answer = self.ask("Runtime.evaluate", {"expression": expression, "returnByValue": True})
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def _told(self, *methods: str) -> list[dict[str, Any]]:
        return [
            event["params"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event.get("method") in methods
        ]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """Everything that the console shows, the page's own faults and refused requests among it."""
        return self._told("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")

    @property
    def requested(self) -> list[str]:
        """Addresses of all requests."""
        return [str(one["request"]["url"]) for one in self._told("Network.requestWillBeSent")]

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the window, or of the whole page."""
        shot = self.ask("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        """The page as it is printed on A4."""
        size = {"paperWidth": 8.27, "paperHeight": 11.69}
        return base64.b64decode(self.ask("Page.printToPDF", size)["data"])
