"""All ranks do something after the same step."""

from __future__ import annotations

import threading

from raydist.worker.agreed import NOT_IN_FIT, Action, AgreedActions
from tests.waiting import wait_until


def test_a_rank_pauses_after_its_next_step_until_the_common_one_is_known() -> None:
    actions, at = AgreedActions(), 4
    done: list[tuple[int, list[Action]]] = []
    actions.begin(at)
    assert actions.hold() == 5
    assert actions.hold() == 5

    def train() -> None:
        for step in range(5, 9):
            done.append((step, actions.due(step)))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(0.2)
    assert (thread.is_alive(), done) == (True, [])
    save = Action(7, "save")
    actions.agree(save)
    wait_until(lambda: not thread.is_alive(), "the training")
    assert done == [(5, []), (6, []), (7, [save]), (8, [])]


def test_it_goes_on_if_not_all_can_hold() -> None:
    actions = AgreedActions()
    actions.begin(0)
    assert actions.hold() == 1
    actions.release()
    assert actions.due(1) == []


def test_outside_of_a_fit_there_is_no_step() -> None:
    actions = AgreedActions()
    assert actions.hold() == NOT_IN_FIT
    actions.begin(3)
    assert actions.hold() == 4
    actions.agree(Action(9, "save"))
    actions.begin(NOT_IN_FIT)
    assert actions.hold() == NOT_IN_FIT
    actions.begin(0)
    assert actions.due(9) == []
