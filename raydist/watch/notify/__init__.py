"""The processes that tell a webhook or a command what has become of a run. (driver)

track.py starts one for each receiver, as it does for a tracker: it survives the driver's death, and
then tells that. If the driver's whole machine is lost, a deputy on another one tells it.

    child.py      The main loop: follows events.jsonl and sends each kind of message once
    delivery.py   Send one message to a webhook or a command, within half a minute
    deputy.py     The process on each other machine of a run that tells if the driver's is lost
    message.py    Events of a run -> its messages, and their forms
    who_tells.py  When the driver's machine counts as lost, and which of the others tells it
"""

from __future__ import annotations

WAIT_S = 10.0
"""Longest time that the command waits, at the end of a run, for its last message."""
END_S = 60.0
"""Longest time that this process goes on after the end of a run."""
