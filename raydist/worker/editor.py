"""An editor's session in a rank, by debugpy; its text takes the rank's channel. (rank side)

debugpy speaks the editor's protocol (DAP) itself, over a TCP connection that it opens. For that
moment this process listens on 127.0.0.1, and takes the connection only if the other end of it is in
this process, too: no other user of the node gets in, and nothing listens afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

HERE = "127.0.0.1"
LEAVE_S = 2.0
"""Limit on the wait until debugpy has let all threads continue, at the end of a session."""
END_S = 30.0
"""Limit on the wait until debugpy has ended our last session, whose rank goes on meanwhile. It
takes up to a second, and on a busy machine many."""
LAST = 1 << 30
"""The number of our own request: editors count from 1."""
ENDING = ("disconnect", "terminate")
"""Requests by which an editor leaves. With what they may ask for, debugpy ends the process."""
CONFIGURED = "configurationDone"
"""The request after the first breakpoints."""

_traced = False
"""Whether debugpy traces threads of this process."""
_BEGINS = object()
_last_pydb: object = None
"""debugpy's debugger of our last session; _BEGINS while debugpy makes it. The program may have
begun another one."""
Hold = Callable[[], contextlib.AbstractContextManager[None]]


class DapStream:
    """Bytes of the Debug Adapter Protocol -> messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that are complete now."""
        self._rest += data
        while (end := self._rest.find(b"\r\n\r\n")) >= 0:
            size = re.search(rb"Content-Length: *(\d+)", self._rest[:end], re.IGNORECASE)
            last = end + 4 + (int(size[1]) if size else 0)
            if len(self._rest) < last:
                return
            body, self._rest = self._rest[end + 4 : last], self._rest[last:]
            if body:
                yield json.loads(body)


def framed(message: dict[str, Any]) -> bytes:
    """Return a message as bytes of the protocol."""
    body = json.dumps(message).encode()
    return b"Content-Length: %d\r\n\r\n" % len(body) + body


def harmless(message: dict[str, Any]) -> dict[str, Any]:
    """Return a request of an editor that ends no process, whatever it asked for."""
    if message.get("type") == "request" and message.get("command") in ENDING:
        return {**message, "command": ENDING[0], "arguments": {"terminateDebuggee": False}}
    return message


class EditorSession:
    """One session. The rank continues after its end, however it comes."""

    def __init__(self, say: Callable[[str], None], hold: Hold, ended: Callable[[], None]) -> None:
        """`say`: sends text to the editor. `hold`: makes the context in which it is on. `ended`: is
        called at its end."""
        self._say, self._hold, self._on_end = say, hold, ended
        self._early: list[bytes] = []
        """What the editor has sent before debugpy was connected."""
        self._requests, self._replies = DapStream(), DapStream()
        self._debugpy: socket.socket | None = None
        self._lock = threading.Lock()
        """Guards the connection and the end."""
        self._configured, self._disconnected = threading.Event(), threading.Event()
        self.over = self._finished = False

    @property
    def begun(self) -> bool:
        """Whether debugpy debugs this process for it."""
        return self._debugpy is not None and not self.over

    def begin(self) -> None:
        """Have debugpy debug this process, which continues. In the main thread."""
        import pydevd  # debugpy's; `load_debugpy` has imported it

        global _traced, _last_pydb
        with socket.create_server((HERE, 0)) as listener:
            spare_own_threads()
            _traced, _last_pydb = True, _BEGINS
            pydevd.settrace(
                host=HERE,
                port=listener.getsockname()[1],
                suspend=False,
                patch_multiprocessing=False,
                wait_for_ready_to_run=False,  # an editor that is gone would never be ready
                notify_stdin=False,
                dont_trace_start_patterns=(os.path.dirname(sys.modules["debugpy"].__file__ or ""),),
            )
            _last_pydb = pydevd.get_global_debugger()
            connected = accept_own(listener)
        with self._lock:
            if self.over:
                connected.close()
                return
            self._debugpy = connected
            for data in self._early:
                self._pass(data)
        start_thread(self._pump)

    def stop_at(self, frame: FrameType) -> None:
        """Hold this thread after the current line of a frame, once the editor is ready for it."""
        import pydevd

        self._configured.wait()  # its end sets it, too
        if self.over:
            return
        pydevd.settrace(
            suspend=True,
            trace_only_current_thread=True,
            patch_multiprocessing=False,
            notify_stdin=False,
            stop_at_frame=frame,
        )

    def take(self, text: str) -> None:
        """Take text of the editor; "": it has left."""
        data = text.encode("utf-8", "surrogateescape")
        if not data:
            self.leave()
            return
        with self._lock:
            if self._debugpy is None:
                self._early.append(data)
            else:
                self._pass(data)

    def _pass(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # debugpy has closed it: the session ends
            for message in self._requests.feed(data):
                assert self._debugpy is not None
                self._debugpy.sendall(framed(harmless(message)))

    def leave(self) -> None:
        """End the session soon: the threads that debugpy holds continue."""
        with self._lock:
            begun = self.begun
            self.over = self.over or not begun
        if begun:
            start_thread(self._leave)
        else:
            self._finish()

    def _leave(self) -> None:
        assert self._debugpy is not None
        request = {"seq": LAST, "type": "request", "command": ENDING[0]}
        with contextlib.suppress(OSError):  # it has ended by itself
            with self._lock:
                self._debugpy.sendall(framed(harmless(request)))
            self._disconnected.wait(LEAVE_S)
            self._debugpy.shutdown(socket.SHUT_RDWR)

    def _finish(self) -> None:
        with self._lock:
            first, self._finished = not self._finished, True
        if first:
            self._on_end()

    def _pump(self) -> None:
        """Pass on what debugpy sends, until the end."""
        assert self._debugpy is not None
        with self._hold(), contextlib.suppress(OSError):
            while data := self._debugpy.recv(1 << 16):
                self._say(data.decode("utf-8", "surrogateescape"))
                for message in self._replies.feed(data):
                    self._note(message)
        with self._lock:
            self.over = True
            self._debugpy.close()
        self._disconnected.set()
        self._configured.set()
        self._finish()

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("type") == "response":
            if message.get("command") == CONFIGURED:
                self._configured.set()
            if message.get("command") == ENDING[0]:
                self._disconnected.set()


def load_debugpy() -> str:
    """Import debugpy; return why it can't debug this process, empty if it can.

    It replaces the hook of breakpoint(), which is put back.
    """
    hook = sys.breakpointhook
    quiet = "PYDEVD_DISABLE_FILE_VALIDATION"  # it would write a warning into the rank's log
    before = os.environ.get(quiet)
    os.environ[quiet] = "1"
    try:
        importlib.import_module("debugpy.server")
        pydevd = importlib.import_module("pydevd")
    except Exception as error:
        return f"debugpy can't be imported there ({error}); type pip install debugpy on its node"
    finally:
        sys.breakpointhook = hook
        os.environ.pop(quiet)
        if before is not None:
            os.environ[quiet] = before
    if not hasattr(pydevd, "stoptrace"):
        return "its debugpy is too old; type pip install -U debugpy on its node"
    until = time.monotonic() + END_S
    while (active := pydevd.get_global_debugger()) is not None:
        if _last_pydb not in (active, _BEGINS) or time.monotonic() > until:
            return "the program has a debugger already"
        time.sleep(0.02)
    return ""


def spare_own_threads() -> None:
    """Have debugpy leave raydist's threads alone: when it stops all threads, they pass its text on.

    These are the marks by which it knows its own.
    """
    for thread in threading.enumerate():
        if thread.name.startswith("raydist-"):
            spare(thread)


def spare(thread: threading.Thread) -> None:
    """Mark a thread as one that debugpy does not stop."""
    vars(thread).update(pydev_do_not_trace=True, is_pydev_daemon_thread=True)


def start_thread(target: Callable[[], None]) -> None:
    """Start a thread that debugpy does not stop."""
    thread = threading.Thread(target=target, name="raydist-editor", daemon=True)
    spare(thread)
    thread.start()


def start_timer(after_s: float, call: Callable[[], None]) -> None:
    """Call a function later, in a thread that debugpy does not stop."""
    timer = threading.Timer(after_s, call)
    timer.daemon = True
    spare(timer)
    timer.start()


def accept_own(listener: socket.socket) -> socket.socket:
    """Return the connection whose other end is in this process, too. OSError: there is none."""
    listener.settimeout(LEAVE_S)
    while True:
        connected, peer = listener.accept()
        if peer in own_addresses():
            connected.settimeout(None)
            return connected
        connected.close()


def own_addresses() -> set[Any]:
    """Return the addresses of all IPv4 sockets of this process."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(fd).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(fd.name))) as each:
                    if each.family == socket.AF_INET:
                        found.add(each.getsockname())
    return found


def stop_tracing() -> None:
    """Have this thread run at full speed again, and threads that begin later."""
    global _traced
    if _traced:
        import pydevd

        _traced = False
        pydevd.stoptrace()
