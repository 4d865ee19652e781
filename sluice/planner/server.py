"""A small server for the planner page, on the loopback address alone."""

from __future__ import annotations

import json
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from sluice._base.errors import InputError, SluiceError
from sluice.planner.question import Question, answer

HOST = "127.0.0.1"

_FILES = {
    "/": ("planner.html", "text/html; charset=utf-8"),
    "/planner.css": ("planner.css", "text/css; charset=utf-8"),
    "/planner.js": ("planner.js", "text/javascript; charset=utf-8"),
}
_LONGEST_QUERY = 1000
_HEADERS = {
    # Nothing is fetched from outside, and no other page can hold this one in a frame.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; frame-ancestors 'none'; "
        "base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class PlannerServer(ThreadingHTTPServer):
    """Serves the planner to this machine.

    Args:
        port: 0 takes one that is free.

    Guarantee:
        It listens on the loopback address, so no other machine can reach it, and answers only requests that name that
        address, so a page from elsewhere cannot either by giving its own name to it. It reads no file but its own three
        and computes from the numbers in the request alone.
    """

    daemon_threads = True

    def __init__(self, *, port: int = 0) -> None:
        if not 0 <= port <= 65535:
            raise InputError(f"port={port} is not allowed: it must be from 0 to 65535.")
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise InputError(f"port={port} is not allowed: {error.strerror}. Choose another, or 0 for any.") from error
        # One computation at a time: a slider that is dragged must not occupy every processor.
        self.computing = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"


class _Handler(BaseHTTPRequestHandler):
    server: PlannerServer
    protocol_version = "HTTP/1.1"
    timeout = 30
    server_version = "sluice"
    sys_version = ""

    def do_GET(self) -> None:
        if self.headers.get("Host") not in (
            f"{HOST}:{self.server.server_port}",
            f"localhost:{self.server.server_port}",
        ):
            self._send_json(
                HTTPStatus.FORBIDDEN, {"error": f"Ask for {self.server.url}: other names are not answered."}
            )
            return
        parts = urlsplit(self.path)
        if parts.path == "/plan":
            self._send_plan(parts.query)
        elif parts.path in _FILES:
            name, kind = _FILES[parts.path]
            content = resources.files("sluice.planner").joinpath("page", name).read_bytes()
            self._send(HTTPStatus.OK, content, kind)
        else:
            self._send_json(HTTPStatus.NOT_FOUND, {"error": "There is nothing here; the planner is at /."})

    def _send_plan(self, query: str) -> None:
        try:
            if len(query) > _LONGEST_QUERY:
                raise InputError(f"the query is not allowed: it is longer than {_LONGEST_QUERY} characters.")
            pairs = parse_qsl(query, keep_blank_values=True)
            if len(dict(pairs)) < len(pairs):
                raise InputError("the query is not allowed: it gives a value twice.")
            with self.server.computing:
                found = answer(Question.read(dict(pairs)))
        except (SluiceError, OverflowError) as error:
            self._send_json(HTTPStatus.BAD_REQUEST, {"error": str(error)})
            return
        self._send_json(HTTPStatus.OK, found)

    def _send_json(self, status: HTTPStatus, content: Any) -> None:
        self._send(status, json.dumps(content, allow_nan=False).encode(), "application/json")

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: what is planned is nobody's business."""
