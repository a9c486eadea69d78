"""The stacks of a rank's threads, while they do something."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Python 3.11 collects garbage where objects are created, and 3.12 between two instructions.
BUSY = """
import gc, socket, threading, warnings
from raydist.worker import stacks

warnings.simplefilter("ignore")  # sockets that nobody closes

def start_threads():
    while True:
        thread = threading.Thread(target=int)
        thread.start()
        thread.join()

for _ in range(6):
    threading.Thread(target=start_threads, daemon=True).start()
gc.set_threshold(1)
for _ in range(1500):
    gc.disable()
    for _ in range(8):
        loop = [socket.socket()]
        loop.append(loop)
    del loop
    gc.enable()
    assert "in start_threads" in stacks.of_all_threads()
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_threads_that_start_while_garbage_is_collected_do_not_lock_it_up() -> None:
    done = subprocess.run([sys.executable, "-c", BUSY], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("done\n", "")
