"""`python -m tests.tracing COMMAND` runs it under a seccomp filter that refuses ptrace, as the profile
of a container may."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

CALLS = {"x86_64": (101, 310), "aarch64": (117, 270)}
"""The numbers of ptrace and process_vm_readv by machine."""
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, MODE_FILTER = 38, 22, 2
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, EPERM = 0x7FFF0000, 0x00050001


def refuse_ptrace() -> None:
    """Install the filter in this process; its children inherit it."""
    ptrace, read = CALLS[platform.machine()]
    program = [
        (LOAD, 0, 0, 0),  # the number of the system call
        (JUMP_EQUAL, 1, 0, ptrace),
        (JUMP_EQUAL, 0, 1, read),
        (RETURN, 0, 0, EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    install = PR_SET_SECCOMP, MODE_FILTER, ctypes.addressof(header)
    for words in ((PR_SET_NO_NEW_PRIVS, 1), install):
        if prctl(*map(ctypes.c_ulong, (*words, *[0] * (5 - len(words))))):
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    refuse_ptrace()
    os.execvp(sys.argv[1], sys.argv[1:])
