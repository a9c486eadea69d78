"""What the debugger of a rank says, until the driver takes it. (actor)"""

from __future__ import annotations

import asyncio
import contextlib

from raydist.messages.agent import DebuggerNews
from raydist.messages.rank import DebuggerSays, HeldAt, RankReply, WentOn


class DebuggerDesk:
    """Where the rank waits in its debugger, and what that shows."""

    def __init__(self) -> None:
        self.place = ""
        """As DebuggerNews.place."""
        self._text = ""
        self._over = False
        self._news = asyncio.Event()

    def note(self, message: RankReply) -> None:
        """Note what the rank says, or that it has ended."""
        match message:
            case HeldAt(file, line):
                self.place, self._over = f"{file}:{line}", False
            case DebuggerSays(text):
                self._text += text
            case WentOn():
                self.place, self._over = "", True
        self._news.set()

    async def read(self, patience: float) -> DebuggerNews:
        """Return what is new; wait at most `patience` seconds for it."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), patience)
        self._news.clear()
        news = DebuggerNews(self._text, self.place, self._over)
        self._text, self._over = "", False
        return news
