"""Prints what is no text, lines of a megabyte, and from processes that know nothing of Python."""

import os
import sys

sys.stdout.buffer.write(bytes(range(256)) + b"\n")
sys.stdout.flush()
print("x" * 3_000_000)
os.write(2, b"straight to the descriptor\n")
sys.stdout.flush()
os.system("echo from a shell")
print("no end of line", end="")
