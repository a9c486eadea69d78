"""The page's buttons: who may press them, and what a press asks the driver of the run. (driver)"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from raydist.messages.operate import GetStacks, MakeProfile, Refused, SaveNow, TextReply
from raydist.messages.wire import Message, decode, encode
from raydist.watch.operate.connection import LIMIT, DriverAddress, read_address
from raydist.watch.operate.relay import connect_here

STEPS = 5
"""Steps of a profile."""
REQUESTS: Mapping[str, Message] = {
    "stacks": GetStacks((), native=False),
    "profile": MakeProfile((), STEPS, 0.0, memory=False),
    "save": SaveNow(),
}
"""What each button asks the driver."""
ENDED = "the run has ended"
Answer = dict[str, object]
"""`lines` and `file` of a TextReply, or an `error`; empty: only a sign of life."""


def is_same_origin(headers: Mapping[str, str], host: str) -> bool:
    """Report whether a page of this server has sent the request, as its browser says.

    `host`: the request's own. Source: Fetch Metadata (W3C). A browser sends no Sec-Fetch-Site over
    plain HTTP to another host than this one, but always Origin.
    """
    site = headers.get("Sec-Fetch-Site")
    if site is not None:
        return site == "same-origin"
    origin = urlsplit(headers.get("Origin", ""))
    return origin.scheme in ("http", "https") and origin.netloc == host


def offer(folder: Path) -> dict[str, object]:
    """Return whether a page shows the buttons of a run, and `why` they can't be pressed."""
    address = read_address(folder)
    if address is None or not address.buttons:
        return {"shown": False, "why": ""}
    if not address.is_here():
        why = f"the run's driver is on {address.host}; type raydist stacks, profile or save"
        return {"shown": True, "why": why}
    try:
        owner = os.stat(f"/proc/{address.pid}").st_uid
    except OSError:  # it was killed
        return {"shown": False, "why": ""}
    why = "" if owner == os.getuid() else "the run belongs to another user"
    return {"shown": True, "why": why}


async def press(folder: Path, button: str, life_s: float) -> AsyncIterator[Answer]:
    """Ask the driver of a run; yield its answers, and a sign of life every `life_s` seconds."""
    address = read_address(folder)
    if address is None or not address.buttons:
        yield {"error": ENDED if address is None else "watch.operate=false: it has no buttons"}
        return
    try:
        async for answer in driver_answers(address, REQUESTS[button], life_s):
            yield answer
    except PermissionError:
        yield {"error": "the run belongs to another user"}
    except OSError:
        yield {"error": ENDED}


async def driver_answers(
    address: DriverAddress, request: Message, life_s: float
) -> AsyncIterator[Answer]:
    """Send a request to a driver; yield its answers. OSError: it has ended."""
    link = connect_here(address.socket)
    reader, writer = await asyncio.open_unix_connection(sock=link.sock, limit=LIMIT)
    writer.write(encode(request) + b"\n")
    writer.write_eof()  # the only request: the driver closes the connection after its answers
    line = b""
    try:
        while True:
            try:
                line = await asyncio.wait_for(reader.readline(), life_s)
            except asyncio.TimeoutError:
                yield {}
                continue
            if not line:
                return
            yield as_answer(decode(line))
    finally:
        writer.close()


def as_answer(message: Message) -> Answer:
    """Return what a page gets of a driver's message."""
    match message:
        case TextReply(lines, file):
            return {"lines": lines, "file": file}
        case Refused(text):
            return {"error": text}
    return {"error": f"the run's raydist is another one: it sent {type(message).__name__}"}
