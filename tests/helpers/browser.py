"""A headless Chromium, told what to do through pipes (Chrome DevTools Protocol): no port, no driver."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_STARTING = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run"]
_STARTING += ["--disable-dev-shm-usage", "--disable-background-networking", "--disable-extensions"]


def find_browser() -> str | None:
    """Where one is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page; `complaints` has what the console and failed loads said since it was opened."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer, self._number, self._session = b"", 0, ""
        self.complaints: list[str] = []
        self._events: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its answer; raises RuntimeError for an error."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            got = self._receive()
            if got.get("id") == self._number:
                if "error" in got:
                    raise RuntimeError(f"{method}: {got['error']}")
                return got["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._from, 1 << 20)
            if not more:
                raise RuntimeError("the browser has ended")
            self._buffer += more
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        method = message.get("method", "")
        self._events.append(method)
        if method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.complaints.append(json.dumps(message["params"]))
        elif method == "Network.requestWillBeSent":
            url = message["params"]["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.complaints.append(f"asked the network for {url}")
        return message

    def open(self, file: Path, *, width: int, dark: bool = False) -> None:
        """Show a file in a window of that width and wait until it is loaded."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self._events.clear()
        self.call("Page.navigate", url=file.resolve().as_uri())
        while "Page.loadEventFired" not in self._events:
            self._receive()

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def print(self, path: Path) -> None:
        """The page as PDF, as it would be printed."""
        data = self.call("Page.printToPDF", preferCSSPageSize=True, paperWidth=8.27, paperHeight=11.69)[
            "data"
        ]
        path.write_bytes(base64.b64decode(data))


def require_good_page(file: Path, folder: Path, sections: Sequence[str]) -> None:
    """A phone, a desk and paper show the page whole, and it neither complains nor asks for anything.

    Skips the test where no browser is installed.
    """
    program = find_browser()
    if program is None:
        pytest.skip(f"no browser is installed ({', '.join(NAMES)}): apt-get install chromium")
    with headless(program, folder / "profile") as browser:
        for width in (360, 1280):
            browser.open(file, width=width, dark=width == 360)
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            assert (
                browser.evaluate("[...document.querySelectorAll('section')].map(one => one.id)") == sections
            )
            shown = "[...document.querySelectorAll('section, svg[role=img]')]"
            heights = browser.evaluate(f"{shown}.map(one => one.getBoundingClientRect().height)")
            assert min(heights) > 40
            unnamed = "[...document.querySelectorAll('svg[role=img]')].filter(one => !one.ariaLabel).length"
            assert browser.evaluate(unnamed) == 0
        browser.print(folder / "page.pdf")
        assert browser.complaints == []


@contextmanager
def headless(program: str, profile: Path) -> Iterator[Browser]:
    """A browser with a new profile, ended with the block."""
    their_in, to_browser = os.pipe()
    from_browser, their_out = os.pipe()
    # the protocol's pipes are the descriptors 3 and 4 of the browser's process
    command = f'exec "$0" "$@" 3<&{their_in} 4>&{their_out}'
    arguments = [*_STARTING, f"--user-data-dir={profile}"]
    with (profile.parent / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", command, program, *arguments],
            pass_fds=(their_in, their_out),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    os.close(their_in)
    os.close(their_out)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        process.terminate()
        process.wait()
        os.close(to_browser)
        os.close(from_browser)
