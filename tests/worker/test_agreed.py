"""All ranks do something after the same step."""

from __future__ import annotations

import threading

from raydist.worker.agreed import Action, AgreedActions
from tests.waiting import wait_until


def test_a_rank_pauses_after_its_next_step_until_the_common_one_is_known() -> None:
    actions, at = AgreedActions(), 4
    done: list[tuple[int, list[Action]]] = []
    actions.enter_fit(1, at)
    assert actions.hold_in_fit() == (5, 1)
    assert actions.hold_in_fit() == (5, 1)

    def train() -> None:
        for step in range(5, 9):
            done.append((step, actions.due(step)))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join(0.2)
    assert (thread.is_alive(), done) == (True, [])
    save = Action(7, "save", fit=1)
    actions.agree(save)
    wait_until(lambda: not thread.is_alive(), "the training")
    assert done == [(5, []), (6, []), (7, [save]), (8, [])]


def test_it_goes_on_if_not_all_can_hold() -> None:
    actions = AgreedActions()
    actions.enter_fit(1, 0)
    assert actions.hold_in_fit() == (1, 1)
    actions.release()
    assert actions.due(1) == []


def test_outside_of_a_fit_the_steps_of_optimizers_count() -> None:
    actions = AgreedActions()
    assert [actions.count(), actions.count()] == [1, 2]
    assert actions.due(2) == []
    assert actions.hold_in_fit() == (3, 0)
    actions.release()
    actions.enter_fit(1, 9)
    assert actions.count() == 0
    assert actions.hold_in_fit() == (10, 1)
    actions.agree(Action(12, "save", fit=1))
    actions.leave_fit()
    assert actions.count() == 3
    actions.agree(Action(4, "profile"))
    assert actions.due(actions.count()) == [Action(4, "profile")]
    actions.enter_fit(2, 11)
    assert actions.due(12) == []
