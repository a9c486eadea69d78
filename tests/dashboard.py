"""The part of a Ray dashboard that `watch --job` uses: a job, and the files of its run folder
through Ray's log API.

It answers like Ray 2.60 (dashboard/modules/log): `file` is the current content, `stream` also what
is appended later. The headers come with the first byte, so the stream of an empty file sends
nothing. A missing file is a 500.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import ray

BLOCK = 1 << 12


@dataclass
class Dashboard:
    """A server of one job's run folder, running inside the `with` block."""

    folder: Path
    job: str = "watched"
    sweep: bool = False
    """Whether the folder is that of a sweep."""
    pause_s: float = 0.0
    """Pause between two blocks, as on a slow connection."""
    cuts: dict[str, int] = field(default_factory=dict)
    """Bytes after which the connection breaks, once, by `file` or `stream` and the name."""
    requests: Counter[str] = field(default_factory=Counter)
    """Number of requests by `file` or `stream` and the name, as in "stream logs/rank-0.log"."""
    streams: Counter[str] = field(default_factory=Counter)
    """Number of open streams by name."""

    def __enter__(self) -> Dashboard:
        dashboard = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                dashboard.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._ended = threading.Event()
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        url = urlsplit(request.path)
        if url.path == "/api/version":
            self._json(request, {"version": "4", "ray_version": ray.__version__, "ray_commit": "x"})
        elif url.path == f"/api/jobs/{self.job}":
            self._json(
                request,
                {"type": "SUBMISSION", "submission_id": self.job, "status": "RUNNING", "entrypoint": "x",
                 "driver_node_id": "a" * 56},
            )  # fmt: skip
        elif url.path.startswith("/api/v0/logs/"):
            link = f"raydist/{self.job}{'.sweep' if self.sweep else ''}/"
            name = parse_qs(url.query)["filename"][0].removeprefix(link)
            self._log(request, url.path.rpartition("/")[2], name)
        else:
            request.send_error(404)

    def _json(self, request: BaseHTTPRequestHandler, value: object) -> None:
        body = json.dumps(value).encode()
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.send_header("Content-Type", "application/json")
        request.end_headers()
        request.wfile.write(body)

    def _log(self, request: BaseHTTPRequestHandler, kind: str, name: str) -> None:
        self.requests[f"{kind} {name}"] += 1
        path = self.folder / name
        if not path.is_file():
            request.send_error(500, "A file is not found")
            return
        if kind == "stream":
            self.streams[name] += 1
        try:
            self._send(request, path, kind == "stream", self.cuts.pop(f"{kind} {name}", -1))
        except ConnectionError:
            pass
        finally:
            if kind == "stream":
                self.streams[name] -= 1
            request.close_connection = True

    def _send(self, request: BaseHTTPRequestHandler, path: Path, follow: bool, cut: int) -> None:
        begun, sent = False, 0
        with path.open("rb") as file:
            while not self._ended.is_set():
                block = file.read(BLOCK)
                if (block or not follow) and not begun:
                    request.send_response(200)
                    request.send_header("Transfer-Encoding", "chunked")
                    request.end_headers()
                    begun = True
                if block:
                    request.wfile.write(b"%x\r\n%s\r\n" % (len(block), block))
                    sent += len(block)
                elif not follow:
                    request.wfile.write(b"0\r\n\r\n")
                    return
                elif disconnected(request):
                    return
                if 0 <= cut <= sent:
                    return  # without the last chunk
                time.sleep(self.pause_s if block else 0.02)


def disconnected(request: BaseHTTPRequestHandler) -> bool:
    """Return whether the client has closed the connection."""
    request.connection.setblocking(False)
    try:
        return not request.connection.recv(1)
    except BlockingIOError:
        return False
    finally:
        request.connection.setblocking(True)
