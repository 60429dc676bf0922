"""The system's Chromium, driven over a pipe by its own protocol, so that nothing else needs to be installed."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio")
# Puts the two ends where the browser looks for them, and becomes it.
HANDED = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
SECONDS = 60.0  # for one answer


class Tab:
    """A page that is open, what it asked for, and what it complained of."""

    def __init__(self, browser: "Browser", session: str):
        self.browser, self.session = browser, session
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression; a promise is waited for."""
        given = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        found = self.call("Runtime.evaluate", **given)
        if "exceptionDetails" in found:
            raise AssertionError(found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """The value of an expression once it is true."""
        end = time.monotonic() + SECONDS
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, expression
            time.sleep(0.05)
        return value

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """With the mouse, from one place in the window to another."""
        steps = [
            ("mouseMoved", start, 0),
            ("mousePressed", start, 1),
            ("mouseMoved", end, 1),
            ("mouseReleased", end, 0),
        ]
        for kind, (x, y), buttons in steps:
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=buttons, clickCount=int(buttons)
            )

    def hover(self, x: float, y: float) -> None:
        """With the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path) -> None:
        """A screenshot of what is in the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        return int(self.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def hear(self, event: dict[str, Any]) -> None:
        kind, told = event["method"], event["params"]
        if kind == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        if kind == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        if kind == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])
        if kind == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(told["args"]))


class Browser:
    """One process of it."""

    def __init__(self, read: int, write: int):
        self.read, self.write = read, write
        self.number, self.rest = 0, b""
        self.tabs: dict[str, Tab] = {}

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """What it answers; what it tells meanwhile goes to the tabs."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        os.write(self.write, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self.number:
                assert "error" not in told, told
                return dict(told["result"])
            if "method" in told and told.get("sessionId") in self.tabs:
                self.tabs[told["sessionId"]].hear(told)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            ready, _, _ = select.select([self.read], [], [], SECONDS)
            assert ready, "the browser does not answer"
            block = os.read(self.read, 2**20)
            assert block, "the browser is gone"
            self.rest += block
        first, _, self.rest = self.rest.partition(b"\0")
        return dict(json.loads(first))

    def open(
        self, address: str, width: int = 1280, *, dark: bool = False, scripts: bool = True, media: str = "screen"
    ) -> Tab:
        """A page once it is loaded, in a window of so many pixels."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self.tabs[session] = Tab(self, session)
        for domain in ("Page", "Network", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        tab.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=1000, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        tab.call("Emulation.setEmulatedMedia", media=media, features=[scheme])
        tab.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        tab.call("Page.navigate", url=address)
        # The protocol evaluates also where the page's own scripts are off.
        tab.wait("location.href !== 'about:blank' && document.readyState === 'complete'")
        return tab


def chromium() -> str:
    """The program, or the test is skipped."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no Chromium here ({', '.join(NAMES)})")
    done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:  # what some systems have is a stub
        pytest.skip(f"{found} does not start here")
    return found


@contextmanager
def started(folder: Path) -> Iterator[Browser]:
    """A browser with a profile in a folder."""
    program = chromium()
    (theirs, write), (read, other) = os.pipe(), os.pipe()
    # It reads from 3 and writes to 4; the ends of ours lie higher, so that none is overwritten.
    high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in (theirs, other)]
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            HANDED,
            *map(str, high),
            program,
            *FLAGS,
            "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
            "about:blank",
        ],
        pass_fds=high,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for one in (theirs, other, *high):
        os.close(one)
    try:
        yield Browser(read, write)
    finally:
        process.terminate()
        process.wait(timeout=30)
        os.close(read)
        os.close(write)
