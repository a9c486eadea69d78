"""Which addresses are there: real sockets of this machine."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from raydist.cluster.reach import Address, reached_addresses


def full(stack: ExitStack) -> Address:
    """Return an address that accepts no connections: Linux drops them while the queue is full."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    address: Address = listener.getsockname()
    for _ in range(4):
        client = stack.enter_context(socket.socket())
        client.setblocking(False)
        client.connect_ex(address)
    return address


def test_an_address_that_accepts_or_refuses_is_there_and_a_silent_one_is_not() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        with socket.create_server(("127.0.0.1", 0)) as closed:
            refusing: Address = closed.getsockname()
        silent, accepting = full(stack), listener.getsockname()
        assert reached_addresses([silent, accepting, refusing], 0.2) == {accepting, refusing}
        assert reached_addresses([silent], 0.2) == set()
        assert reached_addresses([], 0.2) == set()


def test_an_error_of_this_machine_says_nothing_about_another_one() -> None:
    assert reached_addresses([("no-such-name.invalid", 1)], 0.2) == {("no-such-name.invalid", 1)}
