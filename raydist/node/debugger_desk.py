"""What the debugger of a rank says, until the driver takes it. (actor)"""

from __future__ import annotations

import asyncio
import contextlib

from raydist.messages.agent import DebuggerNews
from raydist.messages.rank import DebuggerSays, EditorPrepared, HeldAt, RankReply, WentOn


class DebuggerDesk:
    """Where the rank waits in its debugger, and what that shows."""

    def __init__(self) -> None:
        self.place = ""
        """As DebuggerNews.place."""
        self._text = ""
        self._over = False
        self._news = asyncio.Event()
        self._editor: asyncio.Future[str] | None = None
        """The PrepareEditor request that the rank has not answered yet."""

    def expect_editor(self) -> asyncio.Future[str]:
        """Return what becomes the reason why no editor can debug the rank, or ""."""
        self._note_editor("another person has asked for it")
        self._editor = asyncio.get_running_loop().create_future()
        return self._editor

    def _note_editor(self, why_not: str) -> None:
        if self._editor is not None and not self._editor.done():
            self._editor.set_result(why_not)

    def note(self, message: RankReply) -> None:
        """Note what the rank says, or that it has ended."""
        match message:
            case HeldAt(file, line):
                self.place, self._over = f"{file}:{line}" if file else "", False
            case DebuggerSays(text):
                self._text += text
            case WentOn():
                self.place, self._over = "", True
            case EditorPrepared(why_not):
                self._note_editor(why_not)
                return
        self._news.set()

    async def read(self, patience: float) -> DebuggerNews:
        """Return what is new; wait at most `patience` seconds for it."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._news.wait(), patience)
        self._news.clear()
        news = DebuggerNews(self._text, self.place, self._over)
        self._text, self._over = "", False
        return news
