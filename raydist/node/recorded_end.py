"""How a rank ended, and the newest state, of a run whose agents do not answer. (actor)

The ends are in files on the node; the node's fork server answers for the state. Without them the
ranks of a node whose actor is stopped (SIGSTOP, a debugger) would be started again after their end:
what they returned would be lost.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import time
from pathlib import Path

from raydist.messages.agent import RankEnd, RankValue, RecordedEnd
from raydist.messages.server import GetNewestState, NewestState
from raydist.node import kept_server
from raydist.node.fork_launcher import node_folder
from raydist.node.processes import recorded_error
from raydist.shared.own_path import own_folder
from raydist.shared.whole_file import write_at_once
from raydist.worker.heartbeat import BEAT_PAGE, read_beat


def run_folder_here(run: str, node_id: str) -> Path:
    """Return the folder of a run's agents on this node."""
    return node_folder(f"raydist-{os.getuid()}-{run}-{node_id[-8:]}")


def known_run_folder(run: str, node_id: str) -> Path | None:
    """Return the folder of a run's agents on this node.

    None if it is not there, or if another user may have made it.
    """
    folder = run_folder_here(run, node_id)
    with contextlib.suppress(OSError):
        if own_folder(folder, make=False):
            return folder
    return None


def record_end(value: str, code: int, signal: int, beat: int) -> None:
    """Write how a rank ended next to its value, whose path is in its spec.

    Runs in the fork server. `beat`: the descriptor of the rank's heartbeat.
    """
    with mmap.mmap(beat, BEAT_PAGE, prot=mmap.PROT_READ) as page:
        step, phase, _ = read_beat(page)
    with contextlib.suppress(OSError):  # the run's folder is gone, or the disk is full
        ended = json.dumps((code, signal, time.time(), step, phase))
        write_at_once(Path(f"{value}.end"), ended.encode())


def read_end(run: str, node_id: str, rank: int) -> RecordedEnd | None:
    """Return how this rank ended in the newest attempt, and its value.

    None if it runs, or nothing is known.
    """
    folder = known_run_folder(run, node_id)
    if folder is None:
        return None
    base = folder / f"rank-{rank}"
    try:
        code, signal, at, step, phase = json.loads(Path(f"{base}.value.end").read_text())
    except (OSError, ValueError):
        return None
    end = RankEnd(
        code, signal, at, step=step, phase=phase, error=recorded_error(Path(f"{base}.error.json"))
    )
    return RecordedEnd(end, read_value(base))


def read_value(base: Path) -> RankValue:
    """Return what the job of a rank returned or raised, pickled.

    `base`: the path of the rank's files without their endings.
    """
    value, error = (Path(f"{base}.value{end}") for end in ("", ".error"))
    return RankValue(*(path.read_bytes() if path.exists() else None for path in (value, error)))


def newest_state(run: str, node_id: str) -> int | None:
    """Return the step of the newest state of a run that its fork server holds here; -1: none.

    None if the server does not answer.
    """
    folder = known_run_folder(run, node_id)
    if folder is None:
        return None
    reply = kept_server.ask(folder, GetNewestState(str(folder)))
    return reply.step if isinstance(reply, NewestState) else None
