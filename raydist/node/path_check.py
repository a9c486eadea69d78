"""Checks whether this machine sees paths on a shared disk or at a URL. (actor)"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping

from raydist.messages.agent import FindUnreachablePaths
from raydist.state import object_store
from raydist.state.object_store import Remote, parse_path

CHECK_S = 60.0
"""Time limit for checking a path: calls on a network file system that is down block."""


async def find_unreachable_paths(request: FindUnreachablePaths) -> dict[str, str]:
    """Return the paths that this machine can't see, each key with the reason."""
    reasons = await asyncio.gather(*(_check(path, request.env) for path in request.paths.values()))
    return {key: reason for key, reason in zip(request.paths, reasons, strict=True) if reason}


async def _check(path: str, env: Mapping[str, str]) -> str:
    remote = isinstance(parse_path(path), Remote)
    check = _check_url(path, env) if remote else asyncio.to_thread(object_store.why_blind, path)
    try:
        return await asyncio.wait_for(check, CHECK_S)
    except asyncio.TimeoutError:
        return f"no answer within {CHECK_S:g} s"


async def _check_url(url: str, env: Mapping[str, str]) -> str:
    """Check a URL in a separate process, because `env` may hold its credentials."""
    own_env = {**os.environ, **env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "raydist.state.object_store",
        url,
        env=own_env,
        cwd="/",  # -m imports from the current folder first, which may be /tmp
        stdout=pipe,
        stderr=pipe,
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    last = (errors.decode(errors="replace").strip().splitlines() or ["no answer"])[-1]
    return output.decode(errors="replace") if process.returncode == 0 else last
