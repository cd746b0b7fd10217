"""A headless Chromium, driven through chromedriver's WebDriver protocol (W3C), which needs no further package."""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from tests.e2e.processes import need, started, which

_LIMIT = 60.0  # seconds for a command
_ARGUMENTS = [
    *("--headless=new", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--force-device-scale-factor=1"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
]


class Browser:
    """One window of a Chromium that the chromedriver at a port of this host starts with some arguments."""

    def __init__(self, port: int, arguments: list[str]) -> None:
        self._port = port
        self._session = "/session"
        options = {"args": arguments, "binary": which("chromium")}
        logging = {"browser": "ALL", "performance": "ALL"}
        capabilities = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": logging}
        session = self._send("POST", "", capabilities={"alwaysMatch": capabilities})
        self._session += f"/{session['sessionId']}"

    def _send(self, method: str, path: str, **content: Any) -> Any:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=_LIMIT)
        with closing(connection):
            body = json.dumps(content) if method == "POST" else None
            connection.request(method, self._session + path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            value = json.load(answer)["value"]
        if answer.status != 200:
            raise RuntimeError(f"{method} {path}: {str(value)[:2000]}")
        return value

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self._send("POST", "/goog/cdp/execute", cmd=command, params=parameters)

    def show(self, page: Path, width: int, height: int, scheme: str) -> None:
        """Opens a file in a window of this size, on a light or a dark screen, and forgets what was logged before."""
        self.console(), self.requests()
        self.devtools("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)
        self._send("POST", "/url", url=page.resolve().as_uri())

    def ask(self, expression: str) -> Any:
        return self._send("POST", "/execute/sync", script=f"return {expression}", args=[])

    def until(self, expression: str) -> Any:
        """The value of an expression as soon as it is true.

        Raises:
            RuntimeError: If that takes too long.
        """
        look = f"const look = () => {{ const value = {expression}; value ? done(value) : requestAnimationFrame(look) }}"
        return self._send("POST", "/execute/async", script=f"const done = arguments[0]; {look}; look()", args=[])

    def type(self, field: str, text: str) -> None:
        """Types into the field that a CSS selector names."""
        self.ask(f"document.querySelector({field!r}).focus()")
        self.devtools("Input.insertText", text=text)
        self.devtools("Input.dispatchKeyEvent", type="keyUp")

    def console(self) -> list[str]:
        """What the page has written to the console since it was asked last: errors, warnings, refused requests."""
        return [entry["message"] for entry in self._send("POST", "/se/log", type="browser")]

    def requests(self) -> list[str]:
        """Addresses that were asked for since it was asked last, without those of Chromium's own pages."""
        messages = [
            json.loads(entry["message"])["message"] for entry in self._send("POST", "/se/log", type="performance")
        ]
        asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [address for address in asked if not address.startswith("chrome:")]

    def screenshot(self, file: Path) -> None:
        picture = self.devtools("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(picture["data"]))

    def close(self) -> None:
        self._send("DELETE", "")


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser for one test, whose driver writes to a folder; skips it where Chromium or chromedriver is missing."""
    need("chromium", "chromedriver", root=False)
    arguments = [*_ARGUMENTS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        started(["chromedriver", "--port=0"], folder / "chromedriver") as driver,
    ):
        port = int(driver.wait_for(r"started successfully on port (\d+)", _LIMIT)[1])
        window = Browser(port, [*arguments, f"--user-data-dir={profile}"])
        try:
            yield window
        finally:
            window.close()
