"""Looks out for nodes that come while the ranks run, and has the ranks leave at a step boundary. (driver)"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import wait
from contextlib import AbstractContextManager
from dataclasses import dataclass

from raydist.events import Event
from raydist.group import Gang

LOOK_S = 1.0
"""Seconds between two looks at which nodes there are."""
TOLD_S = 60.0
"""Longest wait until all ranks know the step to leave after."""


@dataclass(frozen=True)
class Grown:
    """There are more nodes than the ranks have."""

    text: str


class Lookout(AbstractContextManager["Lookout"]):
    """One attempt's watch over the size. It tells of more nodes once, then leads the ranks out (see context.Leave)."""

    def __init__(self, gang: Gang, tell: Callable[[Grown], None], script: bool) -> None:
        """`script`: a program, which can't be asked to leave: like torchrun's, it is ended at once."""
        self.grown: Grown | None = None
        self._gang, self._tell, self._script = gang, tell, script
        self._fits = self._asked = False
        self._left: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raydist-lookout", daemon=True)

    def __enter__(self) -> Lookout:
        if self._gang.reserve is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._gang.reserve is not None:
            self._thread.join()

    def note(self, rank: int, happened: Event) -> bool:
        """An event of a rank; whether the ranks can be ended now, for others in another number to take over."""
        kind = happened["kind"]
        if kind == "begin" and rank == 0:
            self._fits = True
            return self.wanted()
        if kind == "held":
            threading.Thread(target=self.lead_out, args=(happened["step"] + 1,), daemon=True).start()
        if kind == "left":
            self._left.add(rank)
            return len(self._left) == self._gang.plan.world_size
        return kind == "saved" and self.grown is not None and not self._fits

    def hear(self, grown: Grown) -> bool:
        """More nodes are there; whether the ranks can be ended at once."""
        self.grown = grown
        return self.wanted()

    def wanted(self) -> bool:
        """Ask the ranks to leave, if there is a reason and they can; whether there is no need to ask."""
        if self.grown is None or self._script:
            return self.grown is not None
        if self._fits and not self._asked:
            self._asked = True
            self._gang.call(0, "leave", "hold")
        return False

    def _watch(self) -> None:
        reserve, told = self._gang.reserve, False
        while reserve is not None and not self._over.wait(LOOK_S):
            text = reserve.grown()  # also looks, which gets ready what comes
            if text and not told:
                self._tell(Grown(text))
                told = True

    def lead_out(self, step: int) -> None:
        """Rank 0 stands still: all others are told the step first, for none of them gets beyond it without rank 0."""
        others = [self._gang.call(rank, "leave", f"leave:{step}") for rank in range(1, self._gang.plan.world_size)]
        if not wait(others, timeout=TOLD_S).not_done:
            self._gang.call(0, "leave", f"leave:{step}")
