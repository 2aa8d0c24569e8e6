"""Chromium without a window, driven over its debugging pipe: the messages are JSON, each ended by a zero byte.

No package is needed for it: `--remote-debugging-pipe` reads file descriptor 3 and writes 4.
"""

import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # as root in a container there is none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-extensions",
    "--disable-background-networking",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35, "Escape": 27}  # Windows virtual key codes
TO_BROWSER, FROM_BROWSER = 3, 4


def chromium() -> str:
    """The program; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        pytest.skip("no Chromium on this machine (Debian: apt install chromium)")
    return found


class Browser:
    """One window. Use as a context manager: the process ends with it.

    `complaints` are errors of scripts and of the console, in the order in which they came.
    """

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._replies: dict[int, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._rest = b""
        self._sent = 0
        self._session = ""
        self.complaints: list[str] = []

    def __enter__(self) -> Self:
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        command = [chromium(), *OPTIONS, f"--user-data-dir={self._profile}", "about:blank"]
        redirected = f'exec "$@" {TO_BROWSER}<&{theirs_in} {FROM_BROWSER}>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirected, "bash", *command],
            pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        os.close(self._out)  # the browser ends when its pipe does
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def open(self, path: Path, hash_: str = "") -> None:
        """Load a file of this machine, and wait until it is loaded."""
        for address in ("about:blank", f"{path.resolve().as_uri()}{hash_}"):  # another hash alone would load nothing
            self._events.clear()
            self._call("Page.navigate", url=address)
            self._wait_for("Page.loadEventFired")

    def run(self, script: str) -> Any:
        """The value of a script's last expression, awaited where it is a promise."""
        reply = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in reply:
            raise AssertionError(reply["exceptionDetails"]["exception"].get("description", reply))
        return reply["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait until an expression is true, at most ten seconds."""
        script = f"""new Promise((resolve, reject) => {{
            const began = performance.now();
            const look = () => ({condition}) ? resolve(true)
                : performance.now() - began > 10000 ? reject(new Error("never true: " + {json.dumps(condition)}))
                : requestAnimationFrame(look);
            look();
        }})"""
        assert self.run(script)

    def press(self, key: str) -> None:
        """A key, as from a keyboard."""
        code = KEYS.get(key, ord(key.upper()[0]))
        typed = {} if key in KEYS else {"text": key}
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **typed)

    def window(self, width: int, height: int, dark: bool = False) -> None:
        """The window's size in CSS pixels, and the colours that the reader prefers."""
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path, whole: bool = False) -> None:
        """A PNG of what the window shows, or of the whole page."""
        shown = self._call("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(shown["data"]))

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened."""
        self.run("0")
        asked = [event["params"] for event in self._events if event["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in asked]

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while self._sent not in self._replies:
            self._read()
        reply = self._replies.pop(self._sent)
        assert "error" not in reply, f"{method}: {reply['error']}"
        return reply["result"]

    def _wait_for(self, method: str) -> None:
        while not any(event["method"] == method for event in self._events):
            self._read()

    def _read(self) -> None:
        """Take what has arrived; blocks until something has."""
        arrived = os.read(self._in, 1 << 20)
        assert arrived, "Chromium ended"
        *whole, self._rest = (self._rest + arrived).split(b"\0")
        for text in whole:
            message = json.loads(text)
            if "id" in message:
                self._replies[message["id"]] = message
                continue
            self._events.append(message)
            self._note(message["method"], message.get("params", {}))

    def _note(self, method: str, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = event["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([one.get("value") for one in event["args"]]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.complaints.append(event["entry"]["text"])
