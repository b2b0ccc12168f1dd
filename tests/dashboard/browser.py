"""A headless Chromium of one's own, spoken to over a pipe (DevTools protocol): no driver, no port, no network."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-default-apps", "--disable-extensions",
    "--no-default-browser-check", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
LIMIT_SECONDS = 30.0


def found_browser() -> str | None:
    return next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
    )


class PageFault(AssertionError):
    """The page did what it must not."""


class Browser:
    """One process with one tab."""

    def __init__(self, folder: Path) -> None:
        path = found_browser()
        assert path is not None
        here_in, there_out = os.pipe()
        there_in, here_out = os.pipe()
        words = [path, *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
        self.log = open(folder / "browser.log", "wb")  # noqa: SIM115
        # The browser reads commands from descriptor 3 and answers on 4.
        self.process = subprocess.Popen(
            ["bash", "-c", f"exec {shlex.join(words)} 3<&{there_in} 4>&{there_out}"],
            pass_fds=(there_in, there_out), stdout=self.log, stderr=self.log, start_new_session=True,
            env={**os.environ, "HOME": str(folder), "DBUS_SESSION_BUS_ADDRESS": "disabled:"},
        )  # fmt: skip
        os.close(there_in)
        os.close(there_out)
        self._in, self._out = here_in, here_out
        self._buffer, self._number = b"", 0
        self.requests: list[str] = []
        self.problems: list[str] = []
        """Errors in the console, uncaught ones, and requests that failed."""
        self._session = ""
        target = next(one for one in self.send("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setFocusEmulationEnabled", enabled=True)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the session that was started here
        self.process.wait(10)
        os.close(self._in)
        os.close(self._out)
        self.log.close()

    # The protocol

    def send(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        own = self._number
        message: dict[str, Any] = {"id": own, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + LIMIT_SECONDS
        while True:
            answer = self._receive(end)
            if answer is None:
                raise TimeoutError(f"{method} was not answered within {LIMIT_SECONDS:g} s")
            if answer.get("id") == own:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self, end: float) -> dict[str, Any] | None:
        """The next message; events are noted on the way. None: it is too late."""
        while b"\0" not in self._buffer:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._in], [], [], left)[0]:
                return None
            piece = os.read(self._in, 1 << 16)
            if not piece:
                raise RuntimeError(f"the browser ended with {self.process.wait(5)}")
            self._buffer += piece
        raw, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, facts: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(facts["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = facts["exceptionDetails"]
            self.problems.append(str(details.get("exception", {}).get("description", details.get("text"))))
        elif method == "Runtime.consoleAPICalled" and facts["type"] in ("error", "assert"):
            self.problems.append(str([one.get("description", one.get("value")) for one in facts["args"]]))
        elif method == "Log.entryAdded" and facts["entry"]["level"] == "error":
            self.problems.append(f"{facts['entry']['text']} {facts['entry'].get('url', '')}")

    # What a person does

    def size(self, width: int, height: int = 900, *, is_dark: bool = False, scale: float = 1.0) -> None:
        is_phone = width < 600
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=is_phone
        )
        scheme = "dark" if is_dark else "light"
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        self.requests.clear()
        self.problems.clear()
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete'", "the page loads")

    def ask(self, script: str) -> Any:
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise PageFault(f"{script}: {found['exceptionDetails']['exception'].get('description')}")
        return found["result"].get("value")

    def until(self, script: str, what: str, seconds: float = 20.0) -> None:
        """Wait for it to be true."""
        end = time.monotonic() + seconds
        while True:
            with contextlib.suppress(PageFault):  # a page that is being replaced has nothing
                if self.ask(f"Boolean({script})"):
                    return
            if time.monotonic() > end:
                raise PageFault(f"not within {seconds:g} s: {what} ({script}); problems: {self.problems}")
            time.sleep(0.05)

    def count(self, selector: str) -> int:
        return int(self.ask(f"document.querySelectorAll({json.dumps(selector)}).length"))

    def text(self, selector: str) -> str:
        return str(self.ask(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
