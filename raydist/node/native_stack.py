"""Has py-spy read the stacks of a rank with the frames of C code, if it is there. (actor)"""

from __future__ import annotations

import asyncio

from raydist.messages.agent import NativeStack
from raydist.node import tracing
from raydist.shared.stack_ways import native_obstacle

LIMIT_S = 20.0
"""Limit on the wait for py-spy: it reads the symbols of every library that the rank has loaded."""


async def read(pid: int) -> NativeStack:
    """Return what py-spy says about a process."""
    program = tracing.find_py_spy()
    if program is None:
        return await _failed(pid, "")
    words = ("dump", "--native", "--pid", str(pid))  # it holds the rank meanwhile
    started = await asyncio.create_subprocess_exec(
        program, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(started.communicate(), LIMIT_S)
    except asyncio.TimeoutError:
        started.kill()
        await started.wait()
        return await _failed(pid, f"py-spy has not answered within {LIMIT_S:g} s")
    text = out.decode(errors="replace")
    if started.returncode == 0:
        return NativeStack(text)
    first = (err.decode(errors="replace").strip() or text.strip() or "no message").splitlines()[0]
    return await _failed(pid, f"py-spy failed ({first.strip()})")


async def _failed(pid: int, words: str) -> NativeStack:
    """Return the reason that the node has, rather than what py-spy says."""
    obstacle = native_obstacle(await asyncio.to_thread(tracing.read_tracing, pid))
    return NativeStack("", obstacle.line() if obstacle else words)
