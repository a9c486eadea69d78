"""What an agent reads from a rank or a writer."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from raydist.node import writer


def test_what_cannot_be_read_is_a_warning_and_the_next_message_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ended the connection without a word: later reports and saves were lost."""
    monkeypatch.setattr(writer, "MAX_LINE", 1 << 12)
    ours, its = socket.socketpair()
    events: list[Any] = []

    def add(event: Any) -> None:
        if event["kind"] == "save":
            raise OSError("too many open files")
        events.append(event)

    async def read() -> None:
        reading = asyncio.create_task(writer.read_messages(ours, add, print))
        long = {"kind": "report", "text": "x" * (1 << 14)}
        for event in (long, {"kind": "save"}, {"kind": "report"}):
            await asyncio.to_thread(its.sendall, json.dumps(event).encode() + b"\n")
        its.sendall(b'{"kind": "rep')  # the rank is killed while it sends
        its.close()
        await asyncio.wait_for(reading, 30)

    asyncio.run(read())
    *warnings, saving, last = events
    assert warnings
    assert all("was lost: " in event["text"] for event in warnings)
    assert saving["text"].endswith("was lost: OSError: too many open files")
    assert last == {"kind": "report"}
