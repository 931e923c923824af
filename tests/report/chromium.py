"""Controls a headless Chromium by its DevTools pipe, without a library: open a page, evaluate, click, take a picture.

``make browser`` installs a Chromium into .venv/browser. ``OR1_CHROMIUM`` names another; otherwise PATH is searched.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Self

_OWN = Path(sys.prefix) / "browser" / "chromium"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
_FLAGS = (
    *("--headless", "--no-sandbox", "--no-zygote", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--remote-debugging-pipe", "--no-first-run", "--font-render-hinting=none", "--disable-background-networking"),
)


class BrowserError(RuntimeError):
    """Chromium is gone or does not answer, or an expression that was evaluated in the page raised an error."""


def find_chromium() -> Path | None:
    """Return the path of Chromium's executable; None if there is none."""
    named = os.environ.get("OR1_CHROMIUM")
    if named:
        return Path(named)
    if _OWN.is_file():
        return _OWN
    found = next((path for name in _NAMES if (path := shutil.which(name))), None)
    return Path(found) if found else None


class Chromium:
    """One browser with one page. Everything that the page logs, raises or asks of the network is kept."""

    def __init__(self, executable: Path, width: int = 1280, height: int = 900, deadline_s: float = 60.0) -> None:
        self._deadline_s = deadline_s
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        to_browser, ours_out = os.pipe()
        ours_in, from_browser = os.pipe()
        self._out, self._in = ours_out, ours_in
        # Chromium reads commands from descriptor 3 and writes to 4.
        command = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        environment = os.environ | {"HOME": self._profile.name}
        fonts = executable.with_name("fonts.conf")
        if fonts.is_file():
            environment |= {"FONTCONFIG_FILE": str(fonts), "LD_LIBRARY_PATH": str(executable.with_name("lib"))}
        self._process = subprocess.Popen(
            ["bash", "-c", command, "chromium", executable, *_FLAGS, f"--user-data-dir={self._profile.name}"],
            pass_fds=(to_browser, from_browser),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._unread, self._count, self._session = b"", 0, ""
        self.complaints: list[str] = []
        """Console errors and warnings, uncaught exceptions."""
        self.requests: list[str] = []
        """URLs that the page requested, except data: and blob:."""
        self._events: list[str] = []
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
            self.resize(width, height)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser. A second call does nothing."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for end in (self._out, self._in):
            if end >= 0:
                os.close(end)
        self._out = self._in = -1
        self._profile.cleanup()

    def call(self, method: str, **params: Any) -> Any:
        """Send a command of the DevTools protocol, and return its result. Raises BrowserError."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == self._count:
                if "error" in reply:
                    raise BrowserError(f"{method}: {reply['error']['message']}")
                return reply["result"]

    def resize(self, width: int, height: int, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def open(self, page: Path | str, fragment: str = "") -> None:
        """Load a file or an address; return when the page and its scripts are loaded (event ``load``)."""
        self._events.clear()
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=(page if isinstance(page, str) else page.resolve().as_uri()) + fragment)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of its promise. Raises BrowserError with a thrown error."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression is true. Raises BrowserError after the deadline."""
        give_up_s = time.monotonic() + self._deadline_s
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > give_up_s:
                raise BrowserError(f"not true within {self._deadline_s:g} s: {condition}; {self.complaints}")
            time.sleep(0.02)

    def _read(self) -> dict[str, Any]:
        give_up_s = time.monotonic() + self._deadline_s
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._in], [], [], max(0.0, give_up_s - time.monotonic()))
            part = os.read(self._in, 1 << 20) if ready else b""
            if not part:
                why = "has ended" if ready else f"has said nothing for {self._deadline_s:g} s"
                raise BrowserError(f"Chromium {why}")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent" and not params["request"]["url"].startswith(
            ("data:", "blob:", "about:")
        ):
            self.requests.append(params["request"]["url"])
