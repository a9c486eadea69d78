"""All the ways a program can end; argv: how, and the folder to write into."""

import atexit
import os
import signal
import sys
import threading
import time

how, folder = sys.argv[1:]
here = os.path.join(folder, f"{how}-{os.environ['RANK']}")
left_open = open(here + ".unwritten", "w")
left_open.write("written at the end")
atexit.register(lambda: open(here + ".atexit", "w").close())


def later():
    time.sleep(0.2)
    open(here + ".thread", "w").close()


threading.Thread(target=later).start()
if how == "end":
    pass
elif how == "code":
    sys.exit(3)
elif how == "text":
    sys.exit("no data under /nowhere")
elif how == "raise":
    raise RuntimeError("as it is")
elif how == "hook":
    sys.excepthook = lambda kind, error, frames: print("my own words for", kind.__name__)
    raise RuntimeError("as it is")
elif how == "terminated":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(9))
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
elif how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "syntax":
    compile("def :", "later.py", "exec")
