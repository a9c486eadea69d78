"""Who tells that the driver's machine is lost: the decision, the claim, and the process."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from raydist.cluster.nodes import Node
from raydist.launch.deputies import duties_of
from raydist.messages.deputy import Duty, Raylet, read_duty
from raydist.messages.wire import encode
from raydist.node.deputy_process import MODULE, DeputyProcess
from raydist.watch.notify.deputy import any_answers, claim_message, machine_answers
from raydist.watch.notify.message import About, LastSign, machine_lost
from raydist.watch.notify.who_tells import (
    LOST,
    MAX_ASKED,
    MAX_UNANSWERED,
    QUIET_S,
    Act,
    Claim,
    Signs,
    is_cut_off,
    next_act,
    others_to_ask,
    tells,
)
from raydist.watch.trackers import Ledger
from tests.leftovers import ended
from tests.waiting import wait_until

SECRET = "T0/B0/hush-hush"
DUTY = Duty(
    receivers={"webhook": {"webhook": f"http://127.0.0.1:1/{SECRET}", "form": "json"}},
    ledgers={"webhook": "0a1b"},
    run="mine/x",
    folder="/runs/mine/x",
    cwd="/",
    env={},
    began=100.0,
)


@pytest.mark.parametrize(
    ("signs", "act"),
    [
        (Signs(), "listen"),
        (Signs(quiet_s=QUIET_S - 1), "listen"),
        (Signs(quiet_s=QUIET_S), "call"),  # waits for a node, is stopped, or is gone
        (Signs(dismissed=True), "end"),
        (Signs(dismissed=True, left=True, unanswered_calls=LOST), "end"),
        (Signs(left=True), "call"),
        (Signs(left=True, answered=True), "end"),  # the driver was killed: told on its machine
        (Signs(quiet_s=99, unanswered_calls=LOST - 1), "call"),
        (Signs(quiet_s=99, unanswered_calls=LOST), "ask"),
        (Signs(left=True, quiet_s=99, unanswered_calls=LOST), "ask"),
        (Signs(left=True, quiet_s=999, unanswered_calls=MAX_UNANSWERED), "end"),
    ],
)
def test_what_a_deputy_does_next(signs: Signs, act: Act) -> None:
    assert next_act(signs) == act


@pytest.mark.parametrize(
    ("asked", "answered", "cut_off"),
    [(0, 0, False), (1, 0, True), (1, 1, False), (2, 1, False), (3, 1, True), (16, 8, False)],
)
def test_a_machine_that_most_others_do_not_answer_may_be_the_lost_one(
    asked: int, answered: int, cut_off: bool
) -> None:
    assert is_cut_off(asked, answered) == cut_off


@pytest.mark.parametrize(
    ("claim", "lower", "told"),
    [
        ("mine", False, True),
        ("mine", True, True),
        ("taken", False, False),
        ("taken", True, False),
        ("", False, True),  # no common storage: the first machine that answers
        ("", True, False),
    ],
)
def test_who_tells(claim: Claim, lower: bool, told: bool) -> None:
    assert tells(claim, lower) == told


def raylets(count: int) -> tuple[Raylet, ...]:
    return tuple(Raylet(f"n{i}", f"10.0.0.{i + 1}", 7000 + i) for i in range(count))


@pytest.mark.parametrize(("count", "asked"), [(1, 0), (2, 1), (17, MAX_ASKED), (18, 9), (1000, 16)])
def test_a_deputy_asks_only_some_of_many_machines_and_never_its_own(count: int, asked: int) -> None:
    chosen = others_to_ask(raylets(count), own=0)
    assert len(chosen) == asked
    assert raylets(count)[0] not in chosen


def node(name: str, ip: str) -> Node:
    return Node(id=name, ip=ip, host=name, total={}, free={})


def test_each_machine_but_the_drivers_has_one_duty_and_all_know_the_same_order() -> None:
    driver = node("d", "10.0.0.9")
    others = [node("b", "10.0.0.10"), node("a", "10.0.0.2"), node("a2", "10.0.0.2")]
    ports = {each.id: (each.ip, 7) for each in [driver, *others, node("d2", "10.0.0.9")]}
    duties = duties_of(DUTY, driver, [*others, node("d2", driver.ip), driver], ports, now=160.0)
    assert {name: duty.own for name, duty in duties.items()} == {"a": 0, "b": 1}
    for duty in duties.values():
        assert duty.nodes == (Raylet("a", "10.0.0.2", 7), Raylet("b", "10.0.0.10", 7))
        assert duty.driver == Raylet("d", "10.0.0.9", 7)
        assert duty.elapsed_s == 60.0
    assert duties_of(DUTY, driver, [driver], ports, now=160.0) == {}  # a run on one machine


def test_a_duty_arrives_as_it_was_sent_and_shows_no_secret() -> None:
    duty = replace(DUTY, driver=Raylet("d", "10.0.0.9", 7), nodes=raylets(3), own=2)
    assert read_duty(encode(duty)) == duty
    assert SECRET not in repr(duty)
    with pytest.raises(ValueError, match="not a message"):
        read_duty(b'{"protocol": "Nothing"}')


def test_one_machine_gets_the_right_to_tell_and_a_resumed_run_knows(tmp_path: Path) -> None:
    Ledger(id="0a1b", sent_kinds=["slow"]).write(tmp_path, "webhook")
    assert claim_message(tmp_path, "webhook", "0a1b") == "mine"
    assert claim_message(tmp_path, "webhook", "0a1b") == "taken"
    assert Ledger.read(tmp_path, "webhook") == Ledger(id="0a1b", sent_kinds=["slow", "failed"])


def test_what_the_driver_has_told_itself_is_taken(tmp_path: Path) -> None:
    Ledger(id="0a1b", sent_kinds=["failed"]).write(tmp_path, "webhook")
    assert claim_message(tmp_path, "webhook", "0a1b") == "taken"


def test_a_folder_of_the_same_name_gives_no_right(tmp_path: Path) -> None:
    """The run folder is on the disk of each machine, and this one has one of an earlier run."""
    assert claim_message(tmp_path, "webhook", "0a1b") == ""
    Ledger(id="ffff").write(tmp_path, "webhook")
    assert claim_message(tmp_path, "webhook", "0a1b") == ""
    assert claim_message(tmp_path / "none", "webhook", "0a1b") == ""


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_machine_that_refuses_a_connection_is_there() -> None:
    here, nowhere = Raylet("here", "127.0.0.1", closed_port()), Raylet("gone", "255.255.255.255", 9)
    assert machine_answers(here)
    assert not machine_answers(nowhere)
    assert any_answers([nowhere, here])
    assert not any_answers([nowhere])
    assert not any_answers([])


def test_the_message_names_the_machine_the_time_and_the_last_step() -> None:
    sign = LastSign("10.0.0.9", heard_at=0.0, step=41, passed_s=75.0, teller="n2")
    told = machine_lost(About("mine/x", "login-1", "/runs/mine/x"), sign)
    assert (told.event, told.host, told.title) == ("failed", "login-1", "mine/x failed after 1:15")
    assert told.cause == (
        "the driver's machine, login-1 (10.0.0.9), has not answered n2 since "
        "1970-01-01 00:00:00 UTC; the last known step is 41"
    )
    assert "resume=/runs/mine/x" in told.todo
    assert json.loads(told.as_json())["goodput"] is None
    assert "goodput" not in "".join(told.lines)


@contextmanager
def deputy(duty: Duty) -> Iterator[tuple[DeputyProcess, psutil.Process]]:
    """A deputy that an agent has started here, and its process."""
    before = {process.pid for process in psutil.process_iter()}
    started = DeputyProcess.start(duty)
    (process,) = (
        each
        for each in psutil.process_iter(["cmdline"])
        if each.pid not in before and MODULE in (each.info["cmdline"] or ())
    )
    try:
        yield started, process
    finally:
        with suppress(psutil.NoSuchProcess):
            process.kill()


HERE = replace(
    DUTY,
    driver=Raylet("here", "127.0.0.1", 0),
    nodes=(Raylet("n0", "127.0.0.1", 7),),
)


def test_a_deputy_is_no_child_hides_its_duty_and_ends_when_it_is_dismissed() -> None:
    duty = replace(HERE, driver=Raylet("here", "127.0.0.1", closed_port()))
    with deputy(duty) as (started, process):
        assert process.ppid() != os.getpid()
        assert os.getpgid(process.pid) != os.getpgid(0)
        shown = [
            Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("cmdline", "environ")
        ]
        assert not any(SECRET.encode() in text for text in shown)
        if sys.platform == "linux":  # not even its user's other processes can read its memory
            wait_until(lambda: Path(f"/proc/{process.pid}/mem").stat().st_uid == 0, "root", 30)
        started.note_question(3)
        started.dismiss()
        assert ended(process.pid, 30)


def test_a_deputy_ends_with_the_agents_of_a_driver_whose_machine_is_there() -> None:
    """The driver was killed: a process on its machine tells that."""
    duty = replace(HERE, driver=Raylet("here", "127.0.0.1", closed_port()))
    with deputy(duty) as (started, process):
        started.note_question(3)
        started._lines.close()  # as the kernel does
        assert ended(process.pid, 30)


def test_a_deputy_that_cannot_be_started_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(OSError, match="ended with code 1"):
        DeputyProcess.start(DUTY)
