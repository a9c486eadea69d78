"""A headless Chromium that a test drives by its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
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
PATIENCE_S = 30.0


class Browser:
    """A browser inside the `with` block: its first page, then the tab that was last opened or
    brought to the front."""

    def __init__(self, width: int = 1200, height: int = 1000, dark: bool = False) -> None:
        self._size, self._dark = (width, height), dark
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self.tabs: list[Any] = []
        """Connections to the tabs, in the order in which they were opened."""
        self.requests: dict[str, str] = {}
        """By Chromium's id: the URL of everything that the page asked for."""
        self.received: dict[str, float] = {}
        """By URL: bytes of the whole answer, as they travelled."""
        self.errors: list[str] = []
        """What the page's scripts complained about."""

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
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        ])  # fmt: skip
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
        """Drive this tab from now on."""
        self._socket = await self._session.ws_connect(
            page["webSocketDebuggerUrl"], max_msg_size=1 << 28
        )
        self.tabs.append(self._socket)

    async def _open_tab(self) -> None:
        async with self._session.put(f"{self._address}/new") as reply:
            await self._add(await reply.json())

    def new_tab(self, url: str) -> None:
        """Go to an address in a new tab, which hides the others."""
        self._loop.run_until_complete(self._open_tab())
        self._enable()
        self.show_tab(-1)
        self.open(url)

    def show_tab(self, number: int) -> None:
        """Bring a tab to the front, and drive it."""
        self._socket = self.tabs[number]
        self.call("Page.bringToFront")

    def drive_tab(self, number: int) -> None:
        """Drive a tab where it is."""
        self._socket = self.tabs[number]

    def call(self, method: str, **params: Any) -> Any:
        """The answer to a command of the protocol; what happens meanwhile is noted."""
        return self._loop.run_until_complete(
            asyncio.wait_for(self._call(method, params), PATIENCE_S)
        )

    async def _call(self, method: str, params: dict[str, Any]) -> Any:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            told = json.loads((await self._socket.receive()).data)
            if told.get("id") == self._number:
                assert "error" not in told, told
                return told["result"]
            self._note(told.get("method", ""), told.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests[params["requestId"]] = params["request"]["url"]
        elif method == "Network.loadingFinished":
            self.received[self.requests[params["requestId"]]] = params["encodedDataLength"]
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def open(self, url: str) -> None:
        """Go to an address."""
        self.call("Page.navigate", url=url)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        made = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in made, made["exceptionDetails"]
        return made["result"].get("value")

    def text(self, where: str = "body") -> str:
        """What a person reads in an element; empty if it is not there."""
        return str(self.value(f"document.querySelector({json.dumps(where)})?.innerText ?? ''"))

    def until(self, expression: str, timeout: float = PATIENCE_S) -> float:
        """Seconds until the expression is true in the page."""
        began, tried = (
            time.monotonic(),
            f"(() => {{ try {{ return !!({expression}); }} catch {{ return false; }} }})()",
        )
        while time.monotonic() - began < timeout:
            if self.value(tried):
                return time.monotonic() - began
            time.sleep(0.02)
        raise AssertionError(f"not {expression} within {timeout} s: {self.errors}\n{self.text()}")

    def press(self, key: str) -> None:
        text = key if len(key) == 1 else "\r" if key == "Enter" else ""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, text=text if kind == "keyDown" else ""
            )

    def screenshot(self, path: Path) -> None:
        """A PNG of what is seen."""
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))
