"""Serve the page on 127.0.0.1 to whoever has its token. (driver)

It consists of static files, a stream of changes, logs, and other runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from raydist.shared.record_names import NOTE
from raydist.watch.web.buttons import REQUESTS, is_same_origin, offer, press
from raydist.watch.web.follow import SHARED, TURN_S, Fetch, FollowedRun, Viewer, is_here
from raydist.watch.web.run_files import checkpoint_sizes, trace_text
from raydist.watch.web.run_note import read_note
from raydist.watch.web.runs import list_rows, runs_below, sweeps_below
from raydist.watch.web.saved_settings import CONFIG, OVERRIDES, SavedSettings, read_settings
from raydist.watch.web.sweep import FollowedSweep, SweepViewer, is_sweep

if TYPE_CHECKING:
    from aiohttp import web

STATIC = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".LICENSE": "text/plain",
}
POLL_S = 0.5
"""Seconds between two looks at a run folder while somebody watches."""
PING_S = 15.0
"""Seconds of silence after which a stream sends a sign of life: proxies close silent
connections."""
CURVES_S = 2.0
"""Seconds between two looks for new points of a sweep's curves."""
SEARCH_S = 20.0
"""Limit on a search's wait for logs from elsewhere; browsers give up after minutes."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
DOWNLOAD = {"Content-Disposition": "attachment"}
Handler = Callable[["web.Request"], Awaitable["web.StreamResponse"]]


@dataclass
class PageServer:
    """The page of the runs below one folder."""

    root: Path
    first: str
    """The run that the page shows if its address names none.

    Empty: the list of runs, or the sweep that `root` is.
    """
    token: str
    fetch: Fetch = is_here
    """Fetches files of the first run, or else of the sweep that `root` is, into its folder."""
    followed: dict[str, FollowedRun] = field(default_factory=dict)
    sweeps: dict[str, FollowedSweep] = field(default_factory=dict)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer a request whose path contains the token. A proxy may add a prefix to the path."""
        from aiohttp import web

        *before, name = request.path.split("/")
        if not before or not hmac.compare_digest(before[-1].encode(), self.token.encode()):
            if hmac.compare_digest(name.encode(), self.token.encode()) and request.method == "GET":
                return web.Response(status=308, headers={"Location": f"{name}/"})
            return web.Response(status=404)
        calls: dict[str, Handler] = {
            "runs": self.runs,
            "stream": self.stream,
            "curves": self.curves,
            "csv": self.csv,
            "nodes": self.nodes,
            "sizes": self.sizes,
            "trace": self.trace,
            "settings": self.settings,
            "file": self.file,
            "log": self.log,
            "search": self.search,
            "trials": self.trials,
        }
        if name == "press" and request.method == "POST":
            return await self.pressed(request)
        if request.method != "GET":
            return web.Response(status=405, headers=HEADERS)
        if name in calls:
            return await calls[name](request)
        whole_sweep = not self.first and not request.query.get("run") and is_sweep(self.root)
        file = STATIC / (name or ("sweep.html" if whole_sweep else "index.html"))
        if file.parent != STATIC or file.suffix not in TYPES or not file.is_file():
            return web.Response(status=404, headers=HEADERS)
        return web.Response(
            body=file.read_bytes(),
            content_type=TYPES[file.suffix],
            charset="utf-8",
            headers=HEADERS,
        )

    def run(self, request: web.Request) -> FollowedRun:
        """Return the run that the request names, else the first; HTTPNotFound if it is missing."""
        from aiohttp import web

        name = request.query.get("run") or self.first
        found = name and name == self.first  # it may be in no list: a hidden folder
        found = found or name in self.followed or self._is_trial(name)
        if found or name in runs_below(self.root, most=None):
            return self.follow(name)
        raise web.HTTPNotFound(headers=HEADERS)

    def follow(self, name: str) -> FollowedRun:
        """Return a run of the list, with everything that was read of it."""
        if name not in self.followed:
            if self._is_trial(name):
                return self._whole_sweep().run(name)
            self.followed[name] = FollowedRun(
                self.root / name, self.fetch if name == self.first else is_here
            )
        return self.followed[name]

    def _is_trial(self, name: str) -> bool:
        """Report whether a run is a trial of the sweep that the folder is."""
        return is_sweep(self.root) and self._whole_sweep().has_trial(name)

    def _whole_sweep(self) -> FollowedSweep:
        """Return the sweep that the folder is."""
        if "." not in self.sweeps:
            self.sweeps["."] = FollowedSweep(self.root, is_here if self.first else self.fetch)
        return self.sweeps["."]

    async def read_first(self) -> None:
        """Read the events of the first run: whoever opens its page later need not wait."""
        if self.first:
            await self.follow(self.first).read_all()

    async def runs(self, request: web.Request) -> web.Response:
        """Return the runs below the folder."""
        rows = await asyncio.to_thread(list_rows, self.root)
        sweep = is_sweep(self.root)
        return as_json(
            {"folder": str(self.root), "first": self.first, "runs": rows, "sweep": sweep}
        )

    def sweep(self, request: web.Request) -> FollowedSweep:
        """Return the sweep that the request names, else that of the folder.

        HTTPNotFound: it does not exist.
        """
        from aiohttp import web

        name = request.query.get("sweep") or "."
        if name == "." and is_sweep(self.root):
            return self._whole_sweep()
        if name not in self.sweeps:
            if name not in (below := sweeps_below(self.root)):
                raise web.HTTPNotFound(headers=HEADERS)
            self.sweeps[name] = FollowedSweep(below[name])
        return self.sweeps[name]

    async def trials(self, request: web.Request) -> web.StreamResponse:
        """Stream changes of a sweep and of the curves of one reported name.

        They are sent as server-sent events, until the viewer leaves.
        """
        viewer = SweepViewer(self.sweep(request), request.query.get("name", ""))
        return await send_events(request, self._sweep_news(viewer))

    async def _sweep_news(self, viewer: SweepViewer) -> AsyncIterator[tuple[str, str]]:
        sent = ""
        silence_sent_at = -math.inf
        curves_sent_at = -math.inf
        while True:
            section = await viewer.sweep.section()
            text, now = json.dumps(section, separators=(",", ":")), time.monotonic()
            if text != sent or now - silence_sent_at > PING_S:
                silence_sent_at = now
                yield "file", json.dumps({"silent_s": round(viewer.sweep.silent_s(), 1)})
            if text != sent:
                sent = text
                yield "sweep", text
            if now - curves_sent_at > CURVES_S:
                share, curves = await viewer.news(section["trials"], TURN_S)
                curves_sent_at = now if share == 1 else -math.inf
                if curves:
                    yield "curves", json.dumps(curves, separators=(",", ":"))
            yield "", ""
            await asyncio.sleep(POLL_S)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Stream changes of the run as server-sent events, until the viewer leaves."""
        run = self.run(request)
        return await send_events(request, self._news(run))

    async def _news(self, run: FollowedRun) -> AsyncIterator[tuple[str, str]]:
        viewer = Viewer(run)
        before = (0, 0)
        silence_sent_at = -math.inf
        offered = ""
        while True:
            share = await run.catch_up()
            if (buttons := json.dumps(offer(run.folder))) != offered:
                offered = buttons
                yield "buttons", buttons
            has_news = (read := (run.files, run.read)) != before or share < 1
            if has_news or time.monotonic() - silence_sent_at > PING_S:
                silence_sent_at = time.monotonic()
                yield (
                    "file",
                    json.dumps({"silent_s": round(run.silent_s(), 1), "number": run.files}),
                )
            if has_news:
                for name, text in viewer.news(share):
                    yield name, text
            before = read
            if share == 1:
                if note := await new_note(viewer):
                    yield "note", note
                yield "", ""
                await asyncio.sleep(POLL_S)

    async def curves(self, request: web.Request) -> web.Response:
        """Return all curves of a run, thinned to a screen.

        With `from` and `to`, only the part between these values of `by` (step or time).
        """
        run = self.run(request)
        await run.read_all()
        low, high = query_number(request, "from", -math.inf), query_number(request, "to", math.inf)
        by = request.query.get("by", "step")
        return as_json(run_curves(run, low, high, by))

    async def nodes(self, request: web.Request) -> web.Response:
        """Return the figures over time of one node, or of all nodes."""
        run = self.run(request)
        await run.read_all()
        return as_json(run.model.nodes.shown(request.query.get("host", "")))

    async def csv(self, request: web.Request) -> web.Response:
        """Return every point of one curve as CSV: step, seconds since the epoch, value."""
        from aiohttp import web

        run = self.run(request)
        await run.read_all()
        curve = run.model.curves.get(request.query.get("name", ""))
        if curve is None:
            raise web.HTTPNotFound(headers=HEADERS)
        points = zip(curve.steps, curve.times, curve.values, strict=True)
        text = "".join(f"{step},{t},{value}\n" for step, t, value in points)
        headers = {**HEADERS, **DOWNLOAD}
        return web.Response(
            text=f"step,time,value\n{text}", content_type="text/csv", headers=headers
        )

    async def sizes(self, request: web.Request) -> web.Response:
        """Return the bytes of each checkpoint that is on this machine, by its path."""
        run = self.run(request)
        await run.read_all()
        return as_json(await asyncio.to_thread(checkpoint_sizes, [*run.model.checkpoints]))

    async def trace(self, request: web.Request) -> web.Response:
        """Return the trace of the run, for Perfetto."""
        from aiohttp import web

        run = self.run(request)
        await run.read_all()
        try:
            text = await asyncio.to_thread(trace_text, run.folder)
        except (OSError, ValueError) as error:
            raise web.HTTPNotFound(headers=HEADERS, text=str(error)) from error
        headers = {**HEADERS, **DOWNLOAD}
        return web.Response(text=text, content_type="application/json", headers=headers)

    async def settings(self, request: web.Request) -> web.Response:
        """Return the saved settings of a run: the overrides, and all values."""
        return as_json((await run_settings(self.run(request)))._asdict())

    async def file(self, request: web.Request) -> web.StreamResponse:
        """Return a page of a failure, or another file of the run folder that a page may read."""
        from aiohttp import web

        run, name = self.run(request), request.query.get("name", "")
        if not SHARED.fullmatch(name):
            raise web.HTTPNotFound(headers=HEADERS)
        with contextlib.suppress(OSError):
            await run.fetch(name, whole=True)
        if not (run.folder / name).is_file():
            raise web.HTTPNotFound(headers=HEADERS)
        if name.endswith(".gz"):
            headers = {**HEADERS, "Content-Disposition": "attachment"}
            # Without a type aiohttp has the browser unpack it.
            return web.FileResponse(
                run.folder / name, headers={**headers, "Content-Type": "application/gzip"}
            )
        text = (run.folder / name).read_text(encoding="utf-8", errors="replace")
        return web.Response(text=text, headers=HEADERS)

    async def pressed(self, request: web.Request) -> web.StreamResponse:
        """Ask the driver of a run what a button asks; send its answers as lines of JSON.

        403: no page of this server has sent it. 400: there is no such button.
        """
        from aiohttp import web

        # A form of another site can send this type only after a request that is refused.
        if (
            not is_same_origin(request.headers, request.host)
            or request.content_type != "application/json"
        ):
            raise web.HTTPForbidden(headers=HEADERS)
        run, button = self.run(request), request.query.get("button", "")
        if button not in REQUESTS:
            raise web.HTTPBadRequest(headers=HEADERS)
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "application/x-ndjson"})
        with contextlib.suppress(ConnectionError):  # the viewer may leave
            await response.prepare(request)
            async for answer in press(run.folder, button, PING_S):
                await response.write(json.dumps(answer).encode() + b"\n")
        return response

    async def log(self, request: web.Request) -> web.StreamResponse:
        """Stream a rank's log: its end, or everything after the byte `from`; then its new lines."""
        run, rank = self.run(request), int(query_number(request, "rank", 0))
        at = int(query_number(request, "from", -1))

        async def lines() -> AsyncIterator[tuple[str, str]]:
            async for piece in run.log(rank, POLL_S, at):
                yield ("log", json.dumps(piece._asdict())) if piece.text else ("", "")

        return await send_events(request, lines())

    async def search(self, request: web.Request) -> web.Response:
        """Return the lines of all logs that contain a text.

        Also return how many logs are not here after SEARCH_S.
        """
        run, text = self.run(request), request.query.get("text", "")
        absent = await run.fetch_logs(SEARCH_S) if text else 0
        lines = await asyncio.to_thread(run.search, text) if text else []
        return as_json({"lines": lines, "absent": absent})


def run_curves(
    run: FollowedRun, low: float = -math.inf, high: float = math.inf, by: str = "step"
) -> dict[str, object]:
    """Return the curves of a run, thinned to a screen, and when it began."""
    pieces = {name: (True, curve.piece(low, high, by)) for name, curve in run.model.curves.items()}
    return {"began": run.model.began, "curves": pieces}


async def run_settings(run: FollowedRun) -> SavedSettings:
    """Return the settings in a run folder that may be elsewhere."""
    for name in (CONFIG, OVERRIDES):
        with contextlib.suppress(OSError):
            await run.fetch(name, whole=True)
    return await asyncio.to_thread(read_settings, run.folder)


async def fetch_note(run: FollowedRun) -> None:
    """Fetch the note in a run folder that may be elsewhere."""
    with contextlib.suppress(OSError):
        await run.fetch(NOTE, whole=True)


async def new_note(viewer: Viewer) -> str:
    """Return the note of the run as JSON; empty if the page has it."""
    if time.monotonic() - viewer.note_fetched > PING_S:  # it is replaced: it can't be followed
        await fetch_note(viewer.run)
        viewer.note_fetched = time.monotonic()
    text = json.dumps(read_note(viewer.run.folder)._asdict())
    if viewer.sent.get("note") == text:
        return ""
    viewer.sent["note"] = text
    return text


def as_json(value: object) -> web.Response:
    from aiohttp import web

    return web.json_response(value, headers=HEADERS)


def query_number(request: web.Request, name: str, default: float) -> float:
    """Return a finite number in the query, or the default; HTTPBadRequest for anything else."""
    from aiohttp import web

    try:
        number = float(request.query.get(name, default))
    except ValueError as error:
        raise web.HTTPBadRequest(headers=HEADERS) from error
    if name in request.query and not math.isfinite(number):
        raise web.HTTPBadRequest(headers=HEADERS)
    return number


async def send_events(
    request: web.Request, news: AsyncIterator[tuple[str, str]]
) -> web.StreamResponse:
    """Send (name, JSON) pairs as server-sent events until the viewer leaves.

    A pair without a name is only a sign of life.
    """
    from aiohttp import web

    response = web.StreamResponse(
        headers={**HEADERS, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
    )
    sent = time.monotonic()
    with contextlib.suppress(ConnectionError):  # the viewer may leave before the first byte, too
        await response.prepare(request)
        async for name, text in news:
            if name or time.monotonic() - sent > PING_S:
                await response.write(
                    f"event: {name}\ndata: {text}\n\n".encode() if name else b":\n\n"
                )
                sent = time.monotonic()
            if request.transport is None or request.transport.is_closing():
                break
    return response


def open_port(port: int = 0) -> socket.socket:
    """Return a socket that listens on 127.0.0.1; OSError: the port is taken."""
    return socket.create_server(("127.0.0.1", port), backlog=16)


async def serve_page(server: PageServer, sock: socket.socket, until: Awaitable[object]) -> None:
    """Serve until `until` is done; then viewers get what is new, and their streams end."""
    from aiohttp import web

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    await web.SockSite(runner, sock).start()
    try:
        await until
    finally:
        await runner.cleanup()


def link(sock: socket.socket, token: str) -> str:
    """Return the address of the page."""
    return f"http://127.0.0.1:{sock.getsockname()[1]}/{token}/"
