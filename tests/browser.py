"""A headless Chromium, driven over a pipe by its DevTools protocol: no driver, no port, no package.

Chromium reads commands from its file descriptor 3 and writes answers and events to 4: JSON, each ended by a zero
byte. An answer that does not come within `PATIENCE` is an error, not a hang. Frames are counted, not slept for.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--disable-breakpad",
    "--remote-debugging-pipe",
)
SHIFT = 8
KEYS = {
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
    "Enter": 13,
    "Escape": 27,
    "Tab": 9,
    "0": 48,
    "+": 187,
    "-": 189,
}


def installed() -> str | None:
    """Return the path of a Chromium, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(RuntimeError):
    """The browser ended, did not answer, or refused a command."""


class Browser:
    """A browser process with a profile of its own in `folder`."""

    def __init__(self, path: str, folder: Path) -> None:
        self._pages: dict[str, Page] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._ids = itertools.count(1)
        self._read = b""
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        # Out of the way of 3 and 4, where the browser wants them.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, events)]
        quiet = os.open(os.devnull, os.O_RDWR)
        moves = [(os.POSIX_SPAWN_DUP2, end, at) for end, at in zip(theirs, (3, 4), strict=True)]
        moves += [(os.POSIX_SPAWN_DUP2, quiet, at) for at in (0, 1, 2)]
        arguments = [path, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        self.pid = os.posix_spawn(path, arguments, os.environ, file_actions=moves, setsid=True)
        for end in (commands, events, quiet, *theirs):
            os.close(end)
        self.call("Browser.getVersion")

    @contextlib.contextmanager
    def page(self, file: Path, width: int = 1200, height: int = 800, dark: bool = False) -> Iterator[Page]:
        """Open a file in a window of its own, and close it at the end."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=file.as_uri())
        page.wait_for("Page.loadEventFired")
        page.settle()
        yield page
        del self._pages[session]
        self.call("Target.closeTarget", targetId=target)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        self._send(json.dumps(message).encode() + b"\0")
        end = time.monotonic() + PATIENCE
        while number not in self._answers:
            self.receive(end, method)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def receive(self, end: float, why: str) -> None:
        """Read what has come, or wait for it until `end`."""
        ready = select.select([self._events], [], [], max(0.0, end - time.monotonic()))[0]
        data = os.read(self._events, 1 << 20) if ready else b""
        if not data:
            raise BrowserError(f"the browser {'ended' if ready else 'did not answer'} ({why})")
        *messages, self._read = (self._read + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            elif (page := self._pages.get(message.get("sessionId", ""))) is not None:
                page.events.append(message)

    def close(self) -> None:
        """End the process and what it started."""
        with contextlib.suppress(BrowserError, BrokenPipeError):
            self.call("Browser.close")
        end = time.monotonic() + 10.0
        handle = os.pidfd_open(self.pid)
        if not select.select([handle], [], [], max(0.0, end - time.monotonic()))[0]:
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        for end_ in (handle, self._commands, self._events):
            os.close(end_)

    def _send(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._commands, data) :]


@dataclass
class Page:
    """One page, and what it has said so far."""

    browser: Browser
    session: str
    events: list[dict[str, Any]] = field(default_factory=list)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def wait_for(self, event: str) -> None:
        end = time.monotonic() + PATIENCE
        while all(one["method"] != event for one in self.events):
            self.browser.receive(end, event)

    def evaluate(self, expression: str) -> Any:
        """Return the value of JavaScript, awaited if it is a promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise BrowserError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def settle(self) -> None:
        """Come back when what was asked for has been drawn."""
        self.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done())))"
        )

    def requests(self) -> list[str]:
        """Every address that it asked for."""
        sent = [one for one in self.events if one["method"] == "Network.requestWillBeSent"]
        return [one["params"]["request"]["url"] for one in sent]

    def complaints(self) -> list[dict[str, Any]]:
        """What went to the console: errors, violations of its policy, and anything it wrote itself."""
        said = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [one["params"] for one in self.events if one["method"] in said]

    def dialogs(self) -> list[dict[str, Any]]:
        return [one["params"] for one in self.events if one["method"] == "Page.javascriptDialogOpening"]

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **more)

    def hover(self, x: float, y: float) -> None:
        self.mouse("Moved", x, y)
        self.settle()

    def click(self, x: float, y: float, times: int = 1) -> None:
        self.hover(x, y)
        for count in range(1, times + 1):
            self.mouse("Pressed", x, y, button="left", clickCount=count)
            self.mouse("Released", x, y, button="left", clickCount=count)
        self.settle()

    def drag(self, start: tuple[float, float], stop: tuple[float, float]) -> None:
        self.mouse("Moved", *start)
        self.mouse("Pressed", *start, button="left", clickCount=1)
        self.mouse("Moved", *stop, button="left", buttons=1)
        self.mouse("Released", *stop, button="left", clickCount=1)
        self.settle()

    def wheel(self, x: float, y: float, down: float) -> None:
        self.mouse("Wheel", x, y, deltaX=0, deltaY=down)
        self.settle()

    def press(self, key: str, shift: bool = False) -> None:
        """Press and let go of a key."""
        code = {"key": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": SHIFT if shift else 0}
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)
        self.settle()

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)
        self.settle()

    def picture(self) -> bytes:
        """A screenshot as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])
