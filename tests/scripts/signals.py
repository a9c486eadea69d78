"""Installs its own handlers, and is called by them."""

import os
import signal
import time

heard = []
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD):
    before = signal.signal(number, lambda number, frame: heard.append(signal.Signals(number).name))
signal.setitimer(signal.ITIMER_REAL, 0.01)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    os.kill(os.getpid(), number)
os.system("true")
until = time.monotonic() + 20
while not {"SIGALRM", "SIGCHLD"} <= {*heard} and time.monotonic() < until:
    time.sleep(
        0.01
    )  # another thread of the process may have got the signal, and be slow to pass it on
print("heard", *sorted(heard))
