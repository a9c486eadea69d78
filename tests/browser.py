"""A headless Chromium that a test controls through its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--hide-scrollbars")  # fmt: skip
PATIENCE_S = 120.0
CHANGED = "net::ERR_NETWORK_CHANGED"
"""Chromium breaks requests off whenever an interface of the machine comes or goes.

Those of the hosts that other tests make do so all the time.
"""


class PageLeft(Exception):
    """The page was left while an expression was evaluated, so it has no value."""


class Browser:
    """A browser that runs inside the `with` block. Methods act on the first page, then on the tab that
    was last opened, shown or chosen by `drive_tab`."""

    def __init__(self, width: int = 1200, height: int = 1000, dark: bool = False) -> None:
        self._size, self._dark = (width, height), dark
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self.tabs: list[Any] = []
        """Connections to the tabs, in the order of opening."""
        self.requests: dict[str, str] = {}
        """The URL of each request of the page, by Chromium's id."""
        self.received: dict[str, float] = {}
        """The bytes of each response as they were transferred, by URL."""
        self.errors: list[str] = []
        """Errors of the page's scripts."""
        self._broken = False
        """Whether a part of the page did not arrive because the machine's network changed."""

    def __enter__(self) -> Browser:
        assert CHROMIUM is not None
        self._folder = tempfile.TemporaryDirectory(prefix="c-", ignore_cleanup_errors=True)
        words = [
            *FLAGS,
            f"--user-data-dir={self._folder.name}",
            "--remote-debugging-port=0",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            [CHROMIUM, *words], env={**os.environ, "HOME": self._folder.name}, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._loop.run_until_complete(self._connect())
        self._enable()
        self.set_dark(self._dark)
        self.resize(*self._size)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("Browser.close")
            self._process.wait(PATIENCE_S)
        finally:
            self._process.kill()
            self._process.wait()
            self._loop.run_until_complete(self._session.close())
            self._loop.close()
            self._folder.cleanup()

    def _enable(self) -> None:
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    async def _connect(self) -> None:
        path, end = Path(self._folder.name) / "DevToolsActivePort", time.monotonic() + PATIENCE_S
        while not (path.exists() and path.read_text().count("\n")):
            assert time.monotonic() < end, "Chromium does not answer"
            await asyncio.sleep(0.05)
        self._session = aiohttp.ClientSession()
        self._address = f"http://127.0.0.1:{path.read_text().split()[0]}/json"
        async with self._session.get(f"{self._address}/list") as reply:
            (first,) = [one for one in await reply.json() if one["type"] == "page"]
        await self._add(first)

    async def _add(self, page: dict[str, str]) -> None:
        """Connect to a tab and act on it from now on."""
        self._socket = await self._session.ws_connect(
            page["webSocketDebuggerUrl"], max_msg_size=1 << 28
        )
        self.tabs.append(self._socket)

    async def _open_tab(self) -> None:
        async with self._session.put(f"{self._address}/new") as reply:
            await self._add(await reply.json())

    def new_tab(self, url: str) -> None:
        """Open an address in a new tab, which hides the others."""
        self._loop.run_until_complete(self._open_tab())
        self._enable()
        self.show_tab(-1)
        self.open(url)

    def show_tab(self, number: int) -> None:
        """Bring a tab to the front and act on it from now on."""
        self._socket = self.tabs[number]
        self.call("Page.bringToFront")

    def drive_tab(self, number: int) -> None:
        """Act on a tab from now on, without bringing it to the front."""
        self._socket = self.tabs[number]

    def call(self, method: str, **params: Any) -> Any:
        """Send a command of the protocol and return its result; note the events that arrive meanwhile."""
        return self._loop.run_until_complete(
            asyncio.wait_for(self._call(method, params), PATIENCE_S)
        )

    async def _call(self, method: str, params: dict[str, Any]) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = json.loads((await self._socket.receive()).data)
            if message.get("id") == self._number:
                why = message.get("error", {}).get("message", "")
                if any(word in why for word in ("navigated", "context")):
                    raise PageLeft(why)
                assert not why, message
                return message["result"]
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests[params["requestId"]] = params["request"]["url"]
        elif method == "Network.loadingFinished":
            self.received[self.requests[params["requestId"]]] = params["encodedDataLength"]
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Network.loadingFailed" and params["errorText"] == CHANGED:
            self._broken |= params["type"] in ("Document", "Script", "Stylesheet")
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            if CHANGED in params["entry"]["text"]:
                return  # the page asks again
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        """Open an address, and wait until its page is loaded."""
        end = time.monotonic() + PATIENCE_S
        while not self._load(url, end):
            assert time.monotonic() < end, f"{url} does not load: the network changes all the time"

    def _load(self, url: str, end: float) -> bool:
        """Load a page; return whether all of it has arrived."""
        self._broken = False
        reply = self.call("Page.navigate", url=url)
        document = reply.get("loaderId")  # none: only the part after # differs
        while document and document != self._document():
            assert time.monotonic() < end, f"{url} does not open"
            time.sleep(0.1)
        self.wait_until("document.readyState == 'complete'")
        return not self._broken and reply.get("errorText") != CHANGED

    def _document(self) -> str:
        """Return Chromium's id of what the page shows."""
        try:
            return str(self.call("Page.getFrameTree")["frameTree"]["frame"]["loaderId"])
        except PageLeft:
            return ""

    def set_dark(self, dark: bool) -> None:
        """Have the system's mode be dark or light."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        reply = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def text(self, where: str = "body") -> str:
        """Return the visible text of an element; empty if there is no such element."""
        return str(self.value(f"document.querySelector({json.dumps(where)})?.innerText ?? ''"))

    def wait_until(self, expression: str, timeout: float = PATIENCE_S) -> float:
        """Wait until the expression is true in the page; return the seconds that it took."""
        began = time.monotonic()
        safe = f"(() => {{ try {{ return !!({expression}); }} catch {{ return false; }} }})()"
        while time.monotonic() - began < timeout:
            with contextlib.suppress(PageLeft):  # the condition is one of the page that comes
                if self.value(safe):
                    return time.monotonic() - began
            time.sleep(0.1)
        raise AssertionError(f"not {expression} within {timeout} s: {self.errors}\n{self.text()}")

    def press(self, key: str) -> None:
        text = key if len(key) == 1 else "\r" if key == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, text=text if kind == "keyDown" else ""
            )

    def screenshot(self, path: Path) -> None:
        """Save a PNG of the visible page."""
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))
