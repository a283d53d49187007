"""Headless Chromium by its DevTools protocol, over a pair of pipes: no driver, no port, no package.

The protocol's words are in https://chromedevtools.github.io/devtools-protocol/. With --remote-debugging-pipe
the browser reads messages from its descriptor 3 and writes to its descriptor 4, each a JSON text and a zero
byte.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
# A busy machine may take long to start a browser; a page that is done is noticed at once.
_SECONDS = 300.0


def program() -> str | None:
    """The browser's path; None where there is none."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Browser:
    """One browser with one page at a time."""

    def __init__(self, writing: int, reading: int) -> None:
        self._writing = writing
        self._reading = reading
        self._unread = b""
        self._messages = 0
        self._events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer; what else is said meanwhile is kept."""
        self._messages += 1
        message = {"id": self._messages, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _SECONDS
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._messages:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._events.append(answer)

    def events(self, session: str) -> list[dict[str, Any]]:
        """What a page said so far without being asked."""
        return [event for event in self._events if event.get("sessionId") == session]

    def wait_for(self, session: str, method: str) -> None:
        """Wait until a page has said this."""
        deadline = time.monotonic() + _SECONDS
        while not any(event["method"] == method for event in self.events(session)):
            self._events.append(self._next(deadline))

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._reading], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser did not answer in time"
            piece = os.read(self._reading, 1 << 20)
            assert piece, "the browser ended"
            self._unread += piece
        message, _, self._unread = self._unread.partition(b"\0")
        return json.loads(message)


class Page:
    """A file opened in the browser at a width and in a colour scheme."""

    def __init__(self, browser: Browser, file: Path, width: int, scheme: str) -> None:
        self._browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._target = target
        self._session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.prefer(scheme)
        self.call("Page.navigate", url=file.resolve().as_uri())
        browser.wait_for(self._session, "Page.loadEventFired")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol to this page."""
        return self._browser.call(method, self._session, **parameters)

    def prefer(self, scheme: str, medium: str = "") -> None:
        """Emulate a reader's choice of colours, and a medium such as print."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=medium, features=features)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and what the browser logged of the page."""
        found = []
        for event in self._browser.events(self._session):
            method, told = event["method"], event["params"]
            if method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
                found.append(str([argument.get("value") for argument in told["args"]]))
            elif method == "Runtime.exceptionThrown":
                found.append(str(told["exceptionDetails"]))
            elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
                found.append(told["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """The addresses that the page asked for, its own included; not those that hold their data."""
        events = self._browser.events(self._session)
        urls = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith(("data:", "blob:"))]

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        image = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(image["data"]))

    def pdf(self) -> bytes:
        """The page as it would be printed on A4."""
        printed = self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True)
        return base64.b64decode(printed["data"])

    def close(self) -> None:
        """Leave the page."""
        self._browser.call("Target.closeTarget", targetId=self._target)


@contextmanager
def started(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own in the folder, ended with the block. It reaches no host."""
    to_browser, writing = os.pipe()
    reading, from_browser = os.pipe()
    command = [
        str(program()),
        "--headless",
        "--remote-debugging-pipe",
        f"--user-data-dir={folder}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--hide-scrollbars",
        # As root, as in a container, it starts without a sandbox or not at all.
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        "about:blank",
    ]
    # Moved out of the way of 3 and 4, where the browser expects them.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_browser, from_browser)]

    def in_place() -> None:
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    process = subprocess.Popen(
        command,
        pass_fds=(3, 4),
        preexec_fn=in_place,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in ends:
        os.close(end)
    os.close(to_browser)
    os.close(from_browser)
    try:
        browser = Browser(writing, reading)
        yield browser
        browser.call("Browser.close")
        process.wait(timeout=30)
    finally:
        process.kill()
        process.wait()
        os.close(writing)
        os.close(reading)
