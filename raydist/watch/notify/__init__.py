"""The processes that send messages about a run to a webhook or a command. (driver)

track.py starts one for each receiver, as it does for a tracker. It survives the driver's death, and
reports it. If the driver's whole machine is lost, a deputy on another machine reports that.

    child.py      The main loop: follows events.jsonl and sends each kind of message once
    delivery.py   Send one message to a webhook or a command, within half a minute
    deputy.py     The process on each other machine of a run that tells if the driver's is lost
    message.py    Events of a run -> its messages, and their forms
    who_tells.py  When the driver's machine counts as lost, and which of the others tells it
"""

from __future__ import annotations

WAIT_S = 10.0
"""Limit on the wait of the driver, at the end of a run, for the last message."""
END_S = 60.0
"""Limit on the time that this process lives after the end of a run."""
