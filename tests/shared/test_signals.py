from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest

from raydist.shared.errors import Stopped
from raydist.shared.signals import stoppable


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_raises_in_the_main_thread_and_the_old_handler_comes_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as caught, stoppable():
        signal.raise_signal(number)
    assert caught.value.exit_code == 128 + number
    assert signal.getsignal(number) is before


def test_a_second_signal_ends_at_once() -> None:
    code = (
        "import os, signal\nfrom raydist.shared.signals import stoppable\nfrom raydist.shared.errors import Stopped\n"
        "with stoppable():\n"
        "    try: os.kill(os.getpid(), signal.SIGINT); signal.pause()\n"
        "    except Stopped:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "        while True: pass\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 130


def test_in_another_thread_nothing_changes() -> None:
    before, seen = signal.getsignal(signal.SIGINT), []

    def work() -> None:
        with stoppable():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
