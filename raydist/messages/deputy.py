"""Driver, agent and deputy: what a node tells if the driver's machine is lost. (either side)

The driver sends Deputize to each node. Its agents start a deputy there (watch.notify.deputy) and
write lines to it: the Duty, then a `beat_line` whenever the driver has asked them something, and
at the end DISMISSED.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from raydist.messages.request import Request
from raydist.messages.wire import Message, decode

DISMISSED = b"over\n"
"""The last line: the run is over, or goes on without this node. The driver tells what there is."""


class Raylet(NamedTuple):
    """A machine, and the port of Ray's that shows whether it can be reached."""

    host: str
    ip: str
    port: int


NOWHERE = Raylet("", "", 0)


@dataclass(frozen=True)
class Duty(Message):
    """What a deputy has to know. No log shows the receivers: a webhook is a secret."""

    receivers: Mapping[str, Mapping[str, str]] = field(repr=False)
    """By webhook or command: the settings `notify.` of this receiver."""
    ledgers: Mapping[str, str]
    """By receiver: the id of its ledger. A node that finds it sees the driver's run folder."""
    run: str
    """NAME/FOLDER."""
    folder: str
    """The run folder, as the driver sees it."""
    cwd: str
    """The folder where the run was started, in which its command is run."""
    env: Mapping[str, str] = field(repr=False)
    """The settings `env.`."""
    began: float
    """When the run began, in seconds since the epoch on the driver's clock."""
    elapsed_s: float = 0.0
    """Seconds of the run until this was sent."""
    driver: Raylet = NOWHERE
    nodes: tuple[Raylet, ...] = ()
    """The other machines of the run, in an order that is the same on each."""
    own: int = 0
    """The place of the deputy's machine among them."""


@dataclass(frozen=True)
class Deputize(Request[None]):
    """Keep a deputy on this node from now on; it replaces that of an earlier attempt."""

    duty: Duty


def read_duty(line: bytes) -> Duty:
    """Return the duty of a line that `wire.encode` made. ValueError: it is none."""
    duty = decode(line)
    if not isinstance(duty, Duty):
        raise ValueError(f"not a duty: {type(duty).__name__}")
    nodes = tuple(Raylet(*each) for each in duty.nodes)
    return replace(duty, driver=Raylet(*duty.driver), nodes=nodes)


def beat_line(step: int) -> bytes:
    """Return the line that the driver was heard. `step`: the newest of the node's ranks, or 0."""
    return b"%d\n" % step
