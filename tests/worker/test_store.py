"""The store of ranks that stay when rank 0's node, which has the store, is lost."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from raydist.node.rendezvous import open_store
from raydist.worker.store import StoreOfAttempt

LIMIT = timedelta(seconds=60)


def enter(attempt: pytest.MonkeyPatch, port: int) -> None:
    attempt.setenv("MASTER_ADDR", "127.0.0.1")
    attempt.setenv("MASTER_PORT", str(port))


def test_what_torch_keeps_in_it_is_in_the_store_of_the_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (first, port), (second, other_port) = open_store("127.0.0.1"), open_store("127.0.0.1")
    enter(monkeypatch, port)
    moving = StoreOfAttempt(LIMIT)
    as_torch: Any = dist.PrefixStore("group", moving)  # type: ignore[attr-defined]
    as_torch.set("key", "1")
    as_torch.wait(["key"], LIMIT)
    assert (as_torch.get("key"), first.get("group/key")) == (b"1", b"1")
    enter(monkeypatch, other_port)
    moving.follow()
    assert not as_torch.check(["key"])
    assert as_torch.add("count", 2) == 2
    assert as_torch.compare_set("key", "", "3") == b"3"
    assert (second.get("group/key"), first.get("group/key")) == (b"3", b"1")
    assert as_torch.delete_key("key")
    moving.follow()  # the same store: nothing changes
    assert as_torch.get("count") == b"2"


def test_a_wait_for_a_missing_key_ends_after_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    store, port = open_store("127.0.0.1")
    enter(monkeypatch, port)
    moving = StoreOfAttempt(LIMIT)
    as_torch: Any = dist.PrefixStore("group", moving)  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="timeout"):
        as_torch.wait(["missing"], timedelta(seconds=0.1))
    assert store is not None
