"""pdb in a rank: what a person types does not become an error of the program."""

from __future__ import annotations

import contextlib
import threading

from raydist.messages.rank import DebuggerSays, HeldAt, RankReply
from raydist.shared.kinds import Event
from raydist.worker.debugger import Debugger
from tests.waiting import wait_until


class Notes:
    """Keeps what a rank would send to its agent."""

    def __init__(self) -> None:
        self.replies: list[RankReply] = []

    def reply(self, message: RankReply) -> None:
        self.replies.append(message)

    def emit(self, event: Event) -> None:
        """Do nothing: only the driver reads events."""

    def hold_beat(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @property
    def said(self) -> str:
        return "".join(each.text for each in self.replies if isinstance(each, DebuggerSays))


def test_run_and_restart_say_what_to_type_and_stay_at_the_prompt() -> None:
    notes = Notes()
    debugger = Debugger(1, notes)
    debugger.post_mortem = True
    try:
        raise ValueError("no such step")
    except ValueError as error:
        session = threading.Thread(target=debugger.examine, args=(error,), daemon=True)
        session.start()
    wait_until(lambda: any(isinstance(each, HeldAt) for each in notes.replies))
    debugger.attach()
    for line in ("run", "restart --lr 1", "p 40 + 2", "q"):
        debugger.take(f"{line}\n")
    session.join(60)
    assert not session.is_alive()
    assert notes.said.count("a rank cannot be started again from here") == 2
    assert "(rank 1) 42\n" in notes.said
