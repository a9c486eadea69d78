"""Has py-spy read the stacks of a rank with the frames of C code, if it is there. (actor)"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys

from raydist.messages.agent import NativeStack

LIMIT_S = 20.0
"""Limit on the wait for py-spy: it reads the symbols of every library that the rank has loaded."""


async def read(pid: int) -> NativeStack:
    """Return what py-spy says about a process."""
    program = shutil.which("py-spy", path=f"{os.path.dirname(sys.executable)}:{os.defpath}")
    program = program or shutil.which("py-spy")
    if program is None:
        return NativeStack("", f"pip install py-spy on {socket.gethostname()}: it is not there")
    words = ("dump", "--native", "--pid", str(pid))  # it holds the rank meanwhile
    started = await asyncio.create_subprocess_exec(
        program, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        out, err = await asyncio.wait_for(started.communicate(), LIMIT_S)
    except asyncio.TimeoutError:
        started.kill()
        await started.wait()
        return NativeStack("", f"py-spy has not answered within {LIMIT_S:g} s")
    text = out.decode(errors="replace")
    if started.returncode == 0:
        return NativeStack(text)
    first = (err.decode(errors="replace").strip() or text.strip() or "no message").splitlines()[0]
    return NativeStack("", f"py-spy failed ({first.strip()})")
