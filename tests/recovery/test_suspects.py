"""A node is suspect if none of its agents has answered in time."""

from __future__ import annotations

from raydist.recovery import deadlines
from raydist.recovery.suspects import Suspects

NODES = ("a", "a", "b")


def test_a_node_is_suspect_once_none_of_its_agents_answers() -> None:
    suspects = Suspects(NODES, 2.0)
    for rank in range(3):
        suspects.note_call(rank, 10.0)
    assert suspects.look(12.0) == set()
    suspects.note_answer(2)
    suspects.note_call(2, 12.0)
    suspects.note_answer(0)
    suspects.note_call(0, 12.0)
    assert suspects.look(12.1) == set()  # rank 1 is late, but rank 0 of its node has answered
    suspects.note_answer(2)
    suspects.note_call(2, 14.0)
    assert suspects.look(14.1) == {"a"}
    suspects.note_answer(1)
    suspects.note_call(1, 14.2)
    assert suspects.look(14.2) == set()


def test_a_node_whose_ranks_have_ended_is_not_suspect() -> None:
    suspects = Suspects(NODES, 2.0)
    suspects.note_call(0, 10.0)
    suspects.note_call(2, 10.0)
    suspects.note_answer(2)
    assert suspects.look(20.0) == {"a"}
    suspects.note_answer(0)
    assert suspects.look(20.0) == set()


def test_a_driver_that_was_paused_suspects_nobody_at_once() -> None:
    suspects = Suspects(NODES, 2.0)
    for rank in range(3):
        suspects.note_call(rank, 10.0)
    suspects.begin_again(500.0)
    assert suspects.look(501.0) == set()
    suspects.note_answer(0)
    suspects.note_call(0, 501.0)
    assert suspects.look(502.1) == {"b"}


def test_agents_that_answer_less_often_are_suspect_later() -> None:
    assert deadlines.suspect_after(2) == 2.0
    assert deadlines.suspect_after(2400) == 1.0 + 2400 / 300
