"""A rank that is called out of its training, as its threads see it; and the sockets it breaks."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from raydist.messages.rank import GoOn, Meet, ParkRank, ParkReply
from raydist.shared import kinds
from raydist.shared.errors import RaydistError
from raydist.worker import in_place
from raydist.worker.in_place import InPlace, break_connections, listening

LIMIT_S = 60.0
HERE = [("127.0.0.1", 1)]


class Group:
    """A process group that notes what it is connected to."""

    def __init__(self) -> None:
        self.connected: list[tuple[int, list[str]]] = []

    def handle(self) -> str:
        return "mine"

    def connect(self, number: int, handles: Sequence[str]) -> None:
        self.connected.append((number, [*handles]))


class Rank:
    """A rank whose agent is the test."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.replies: list[ParkReply] = []
        self.replied = threading.Semaphore(0)
        self.answers: list[list[Any]] = []
        """What the agent sends for each reply, in turn."""
        self.group = Group()
        self.in_place = InPlace(1, self.sent.append, self._reply)

    def _reply(self, message: ParkReply) -> None:
        self.replies.append(message)
        for each in self.answers.pop(0) if self.answers else []:
            self.in_place.take(each)
        self.replied.release()

    def meet(self) -> None:
        self.in_place.meet(self.group, HERE, LIMIT_S)

    def call_into(self, attempt: int) -> None:
        """Call the rank out of its training, and let it meet the ranks of this attempt."""
        self.answers.append([go_on(attempt), Meet(attempt, contacts("mine"))])
        self.in_place.take(ParkRank())

    def outlive(self, train: Callable[[], str], why_not: str = "") -> str:
        return self.in_place.outlive(train, self.meet, lambda: why_not)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    return Rank()


def go_on(attempt: int) -> GoOn:
    return GoOn({"TORCHELASTIC_RESTART_COUNT": str(attempt)})


def contacts(*handles: str) -> list[str]:
    return [json.dumps([each, HERE]) for each in handles]


def test_a_rank_that_is_called_trains_again_once_all_meet_again(rank: Rank) -> None:
    attempts: list[int] = []

    def train() -> str:
        attempts.append(len(attempts))
        if len(attempts) == 1:
            late, meet = Meet(0, contacts("late")), Meet(1, contacts("other", "mine"))
            rank.answers.append([go_on(1), late, meet])
            rank.in_place.take(ParkRank())
            raise RuntimeError("Connection closed by peer")
        return "done"

    assert rank.outlive(train) == "done"
    assert attempts == [0, 1]
    assert rank.replies == [ParkReply("")]
    assert rank.group.connected == [(1, ["other", "mine"])]
    (met,) = rank.sent
    assert (met.rank, met.number, json.loads(met.contact)) == (1, 1, ["mine", [["127.0.0.1", 1]]])
    assert isinstance(met, kinds.MeetRequest)


def test_a_rank_that_is_called_as_it_finishes_trains_again(rank: Rank) -> None:
    attempts: list[int] = []

    def train() -> str:
        attempts.append(1)
        if len(attempts) == 1:
            rank.call_into(1)
        return "done"

    assert rank.outlive(train) == "done"
    assert len(attempts) == 2


def test_a_rank_that_is_called_while_it_waits_for_others_waits_again(rank: Rank) -> None:
    attempts: list[int] = []

    def train() -> str:
        attempts.append(1)
        if len(attempts) == 1:
            rank.answers.append([go_on(1)])
            rank.in_place.take(ParkRank())
            rank.in_place.take(ParkRank())  # the agent asks once; a second call changes nothing
            raise RuntimeError("Connection closed by peer")
        return "done"

    agent = threading.Thread(target=call_again, args=(rank,))
    agent.start()
    assert rank.outlive(train) == "done"
    agent.join()
    assert rank.replies == [ParkReply(""), ParkReply("")]
    assert [number for number, _ in rank.group.connected] == [2]


def test_a_rank_that_is_called_before_it_goes_on_is_called_again(rank: Rank) -> None:
    """A new rank of the next attempt was killed before the main thread has woken up."""
    attempts: list[int] = []

    def train() -> str:
        attempts.append(1)
        if len(attempts) == 1:
            rank.answers.append([go_on(1), ParkRank()])
            rank.answers.append([go_on(2), Meet(2, contacts("mine"))])
            rank.in_place.take(ParkRank())
            raise RuntimeError("Connection closed by peer")
        return "done"

    assert rank.outlive(train) == "done"
    assert len(attempts) == 2
    assert rank.replies == [ParkReply(""), ParkReply("")]
    assert [number for number, _ in rank.group.connected] == [2]


def call_again(rank: Rank) -> None:
    """Call the rank a second time, once it waits for the others of attempt 1."""
    while not rank.sent:
        rank.replied.acquire(timeout=0.01)
    rank.call_into(2)


def test_what_a_job_raises_by_itself_is_raised(rank: Rank) -> None:
    def train() -> str:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        rank.outlive(train)
    rank.in_place.take(ParkRank())
    assert rank.replies == [ParkReply(in_place.NOT_INSIDE)]


def test_a_broken_connection_is_raised_if_no_rank_was_killed(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_place, "PATIENCE_S", 0.1)

    def train() -> str:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:545] Read error")

    with pytest.raises(RuntimeError, match="Read error"):
        rank.outlive(train)


def test_an_error_that_a_broken_connection_caused_waits_for_the_call(rank: Rank) -> None:
    attempts: list[int] = []
    agent = threading.Timer(0.2, rank.call_into, (1,))

    def train() -> str:
        attempts.append(1)
        if len(attempts) > 1:
            return "done"
        agent.start()
        try:
            raise RuntimeError("[gloo/transport/tcp/pair.cc:545] Read error")
        except RuntimeError as error:
            raise RuntimeError("[Stage 0] failed to run forward") from error

    assert rank.outlive(train) == "done"
    agent.join()


def test_a_rank_outside_a_training_is_not_kept(rank: Rank) -> None:
    rank.in_place.take(ParkRank())
    assert rank.replies == [ParkReply(in_place.NOT_INSIDE)]


def test_a_rank_waits_for_the_others_for_a_limited_time(rank: Rank) -> None:
    with pytest.raises(RaydistError, match="within backend"):
        rank.in_place.meet(rank.group, HERE, 0.1)


def test_only_connections_between_ranks_are_broken() -> None:
    before = listening()
    with (
        socket.create_server(("127.0.0.1", 0)) as ranks,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        here, elsewhere = ranks.getsockname(), other.getsockname()
        assert listening() - before == {here, elsewhere}
        with (
            socket.create_connection(here) as to_rank,
            ranks.accept()[0] as from_rank,
            socket.create_connection(elsewhere) as to_other,
            other.accept()[0] as from_other,
        ):
            break_connections(frozenset({here}))
            assert (to_rank.recv(1), from_rank.recv(1)) == (b"", b"")
            to_other.sendall(b"x")
            assert from_other.recv(1) == b"x"


@pytest.mark.parametrize("gloo", ["closes it", "sleeps", "spins"])
def test_a_rank_is_kept_only_if_gloo_closes_the_connections_of_the_attempt(
    rank: Rank, monkeypatch: pytest.MonkeyPatch, gloo: str
) -> None:
    """A collective that had the beginning of a message waited on, and the next barrier for it: all
    ranks of the next attempt hung. gloo's thread spins then."""

    class Killed(Exception):
        pass

    def be_killed() -> None:
        raise Killed

    def read_to_the_end() -> None:
        with other:
            other.recv(1)

    def spin() -> None:
        while not rank.replies:
            pass

    monkeypatch.setattr(in_place, "wait_to_be_killed", be_killed)
    if gloo == "spins":
        monkeypatch.setattr(in_place, "STUCK_S", LIMIT_S)
    attempts: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as ranks:
        rank.in_place.take(Meet(0, [json.dumps(["mine", [ranks.getsockname()]])]))
        rank.meet()
        mine = socket.create_connection(ranks.getsockname())
        other = ranks.accept()[0]

        def train() -> str:
            attempts.append(1)
            if len(attempts) == 1:
                rank.call_into(1)
                raise RuntimeError("Connection closed by peer")
            return "done"

        # as gloo's thread does
        reads = threading.Thread(target=read_to_the_end)
        if gloo == "closes it":
            reads.start()
            mine.close()
            assert rank.outlive(train) == "done"
            reads.join()
            assert rank.replies == [ParkReply("")]
        else:
            if gloo == "spins":
                threading.Thread(target=spin).start()
            with mine, other, pytest.raises(Killed):
                rank.outlive(train)
            assert rank.replies == [ParkReply(in_place.NOT_CLOSED)]
