"""The store of ranks that stay when rank 0's node, which has the store, is lost. (rank side)

A process group of torch keeps the store with which it was made, and connects its ranks through it
each time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

Base: Any = dist.Store  # type: ignore[attr-defined]


class StoreOfAttempt(Base):  # type: ignore[misc]
    """Passes on all calls to the store of the present attempt, as its variables name it."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        self._timeout = timeout
        self._address = ("", "")
        self._store: Any = None
        self.follow()

    def follow(self) -> None:
        """Connect to the store of this attempt, if it is another one."""
        address = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
        if address != self._address:
            host, port = self._address = address
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                host, int(port), is_master=False, timeout=self._timeout
            )

    # Under these names and with these arguments torch calls a store that is made in Python.

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> Any:
        return self._store.get(key)

    def add(self, key: str, value: int) -> Any:
        return self._store.add(key, value)

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> Any:
        return self._store.compare_set(key, expected, desired)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait([*keys], timeout or self._timeout)

    def check(self, keys: Sequence[str]) -> Any:
        return self._store.check([*keys])

    def deleteKey(self, key: str) -> Any:
        return self._store.delete_key(key)

    def getNumKeys(self) -> Any:
        return self._store.num_keys()

    def has_extended_api(self) -> bool:
        return False
