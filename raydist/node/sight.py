"""Whether this machine sees files that others have written, on a shared disk or at a URL. (actor)"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping

from raydist import storage
from raydist.storage import Remote, place

LOOK_S = 60.0
"""Longest look: a network file system that is down holds up whoever asks it."""


async def blind(files: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    """Why this machine can't see each of these files, by its key; those that it sees are left out.

    `env`: variables of the ranks: credentials may be among them. A URL is looked at from a process of its own.
    """
    answers = await asyncio.gather(*(_why(file, env) for file in files.values()))
    return {key: why for key, why in zip(files, answers, strict=True) if why}


async def _why(file: str, env: Mapping[str, str]) -> str:
    remote = isinstance(place(file), Remote)
    look = _from_outside(file, env) if remote else asyncio.to_thread(storage.why_blind, file)
    try:
        return await asyncio.wait_for(look, LOOK_S)
    except asyncio.TimeoutError:
        return f"no answer within {LOOK_S:g} s"


async def _from_outside(file: str, env: Mapping[str, str]) -> str:
    own = {**os.environ, **env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "raydist.storage", file, env=own, stdout=pipe, stderr=pipe
    )
    try:
        said, trouble = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    last = (trouble.decode(errors="replace").strip().splitlines() or ["no answer"])[-1]
    return said.decode(errors="replace") if process.returncode == 0 else last
