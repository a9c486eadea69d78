"""A client of the Debug Adapter Protocol, as an editor is one."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

LIMIT_S = 120.0
"""Limit on the wait for a message on a busy machine."""
Json = dict[str, Any]


class Editor:
    """Connects as VS Code does for the configuration of a launch.json that was printed."""

    def __init__(self, launch: Json, folder: Path) -> None:
        """`folder`: the one that is open in the editor."""
        at = launch["connect"]
        text = json.dumps(launch).replace("${workspaceFolder}", str(folder))
        self._launch: Json = json.loads(text)
        self._sock = socket.create_connection((at["host"], at["port"]), LIMIT_S)
        self._file = self._sock.makefile("rb")
        self._seq = 0
        self.events: list[Json] = []
        """Those that nobody has waited for yet."""

    def request(self, command: str, **arguments: Any) -> Json:
        """Send a request, and return the body of its response, which must be a success."""
        response = self.respond(command, **arguments)
        assert response["success"], response
        body: Json = response.get("body") or {}
        return body

    def respond(self, command: str, **arguments: Any) -> Json:
        """Send a request, and return the response."""
        self._seq += 1
        message = {
            "seq": self._seq,
            "type": "request",
            "command": command,
            "arguments": arguments,
        }
        body = json.dumps(message).encode()
        self._sock.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        while True:
            message = self._read()
            if message["type"] == "response" and message["request_seq"] == self._seq:
                return message
            if message["type"] == "event":
                self.events.append(message)

    def event(self, name: str) -> Json:
        """Return the body of the next event of this name."""
        while True:
            for event in self.events:
                if event["event"] == name:
                    self.events.remove(event)
                    body: Json = event.get("body") or {}
                    return body
            message = self._read()
            if message["type"] == "event":
                self.events.append(message)

    def _read(self) -> Json:
        size = 0
        while line := self._file.readline().strip():
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                size = int(value)
        if not size:
            raise ConnectionResetError
        message: Json = json.loads(self._file.read(size))
        return message

    def attach(self, breakpoints: dict[str, list[int]]) -> None:
        """Do what VS Code does before it lets the program go on. `breakpoints`: lines by file."""
        self.request("initialize", clientID="vscode", adapterID="debugpy", pathFormat="path")
        self.request("attach", **self._launch)
        self.event("initialized")
        for file, lines in breakpoints.items():
            self.set_breakpoints(file, lines)
        self.request("setExceptionBreakpoints", filters=["uncaught"])
        self.request("configurationDone")

    def set_breakpoints(self, file: str, lines: list[int]) -> None:
        """Set all breakpoints of a file."""
        points = [{"line": line} for line in lines]
        made = self.request("setBreakpoints", source={"path": file}, breakpoints=points)
        assert [each["verified"] for each in made["breakpoints"]] == [True] * len(lines)

    def stopped_at(self) -> tuple[int, Json]:
        """Wait until the program is stopped; return the thread and its innermost frame."""
        thread = self.event("stopped")["threadId"]
        return thread, self.request("stackTrace", threadId=thread)["stackFrames"][0]

    def evaluate(self, expression: str, frame: Json) -> str:
        """Return the text of a value in a frame."""
        body = self.request("evaluate", expression=expression, frameId=frame["id"], context="repl")
        return str(body["result"])

    def close(self) -> None:
        """Close the connection."""
        self._file.close()
        self._sock.close()
