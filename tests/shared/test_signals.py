from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading

import pytest

from raydist.shared.errors import Stopped
from raydist.shared.signals import passed_to, raise_again, stoppable


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_raises_in_the_main_thread_and_the_old_handler_comes_back(
    number: signal.Signals,
) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as caught, stoppable():
        signal.raise_signal(number)
    assert caught.value.exit_code == 128 + number
    assert signal.getsignal(number) is before


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_sighup_is_that_of_the_shell_and_ends_nothing() -> None:
    received: list[Stopped] = []
    with stoppable(), passed_to(received.append):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
    assert [stop.exit_code for stop in received] == [129]


@pytest.mark.parametrize(("first", "second"), [("INT", "INT"), ("INT", "TERM"), ("TERM", "INT")])
def test_a_second_signal_ends_at_once(first: str, second: str) -> None:
    code = (
        "import os, signal\nfrom raydist.shared.signals import stoppable\nfrom "
        "raydist.shared.errors import Stopped\n"
        "with stoppable():\n"
        f"    try: os.kill(os.getpid(), signal.SIG{first}); signal.pause()\n"
        "    except Stopped:\n"
        f"        try: os.kill(os.getpid(), signal.SIG{second})\n"
        "        finally:\n"
        "            while True: pass\n"
    )
    code_of_second = 128 + signal.Signals[f"SIG{second}"]
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == code_of_second


def test_a_stop_that_was_passed_over_is_not_lost() -> None:
    """Native modules pass over what is raised while they are imported, as Ray's does."""
    received: list[Stopped] = []
    with stoppable():
        with contextlib.suppress(Stopped):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped):
            raise_again()
        with passed_to(received.append):
            pass
    assert [stop.exit_code for stop in received] == [143]
    with stoppable(), passed_to(received.append):
        raise_again()  # that of another run is over
    assert len(received) == 1


def test_a_stop_passed_to_a_loop_that_ends_is_not_lost() -> None:
    """The next attempt of a run began, and a second signal left it without a result."""
    first: list[Stopped] = []
    second: list[Stopped] = []
    with stoppable():
        with passed_to(first.append):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped):
            raise_again()
        with passed_to(second.append):
            pass
    assert second == first
    assert [stop.exit_code for stop in second] == [143]


def test_in_another_thread_nothing_changes() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with stoppable():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
