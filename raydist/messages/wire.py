"""A message as a packet or a line of JSON. (either side)

| from        | to          | carried by                       | messages                      |
|-------------|-------------|----------------------------------|-------------------------------|
| driver      | agent       | a Ray call, or a thread's call   | `Request[Reply]`, its Reply   |
| agent       | fork server | a Unix socket, JSON              | `ServerMessage`               |
| fork server | agent       | the same socket                  | `ServerReply`                 |
| writer      | agent       | a socket pair, one JSON per line | events, and `ShardsReply`     |
| agent       | rank        | a socket pair, one JSON per line | `RankMessage`                 |
| rank        | agent       | the same pair                    | events, and `RankReply`       |

The files of this package import only the standard library: the Ray worker of each node loads them
at launch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

PACKET = 1 << 17
"""Maximum size of a message to a fork server in bytes: below Linux's default socket buffer of 208
KiB."""
TAG = "protocol"
"""The key of a message's type in its JSON. No event has a key of this name."""
_KINDS: dict[str, type[Message]] = {}
"""Every class of message that this process has imported, by its name."""


class Message:
    """Base of messages that are sent as JSON.

    Each subclass that is a dataclass can be decoded where it was imported.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _KINDS[cls.__name__] = cls


def encode(message: Message) -> bytes:
    """Return a message as one line of JSON, without the newline."""
    return json.dumps({TAG: type(message).__name__, **vars(message)}, default=str).encode()


def decode(data: bytes) -> Message:
    """Return the message of a line of `encode`. ValueError: it is not a message."""
    return from_json(json.loads(data))


def numbered(number: int, packet: bytes) -> bytes:
    """Prefix a packet with the number of a request. The reply has the same number."""
    return b"%d %s" % (number, packet)


def split_number(packet: bytes) -> tuple[int, bytes]:
    """Return the number of the request that a packet is or answers (0: none), and the message."""
    number, _, message = packet.partition(b" ")
    return (int(number), message) if number.isdigit() else (0, packet)


def from_json(fields: Mapping[str, Any]) -> Message:
    """Return the message of parsed JSON. ValueError: it is not a message."""
    try:
        kind = _KINDS[fields[TAG]]
        if not is_dataclass(kind):
            raise ValueError(f"not a message of raydist, but a kind of them: {kind.__name__}")
        own = {
            name: tuple(v) if isinstance(v, list) else v
            for name, v in fields.items()
            if name != TAG
        }
        made: Message = kind(**own)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a message of raydist: {error}") from error
    return made
