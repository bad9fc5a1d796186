"""Serves the report of running experiments on this machine, and rebuilds it whenever their files change."""

import os
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from markupsafe import escape

from tandemrl.apps.asgi import LOOPBACK, is_ours
from tandemrl.apps.report.page import Report, to_html
from tandemrl.apps.report.records import ReportError

UNREAD = ("checkpoints", "hf")
"""Folders of a run that hold nothing to report."""
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    "Cache-Control": "no-store",
}


class LiveReport:
    """The page of a folder, which is rebuilt if a file below it has changed. Thread-safe.

    Args:
        build: builds the report.
    """

    def __init__(self, folder: Path, build: Callable[[], Report]) -> None:
        self.folder, self._build = folder, build
        self._state: object = None
        self._html = ""
        self._lock = Lock()

    def html(self) -> str:
        """The page of the report, or a page that says that there is nothing to report yet."""
        with self._lock:
            state = self._changes()
            if state != self._state:
                try:
                    self._html = to_html(self._build())
                except (ReportError, OSError) as error:  # the run has only begun, or a file is being written
                    self._html = f"<!doctype html><title>Nothing to report yet</title><p>{escape(str(error))}</p>"
                self._state = state
            return self._html

    def _changes(self) -> object:
        """The names, sizes and times of the files that a report reads. Checkpoints and models are not among them."""
        found = []
        for here, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if name not in UNREAD and not name.startswith(".")]
            for name in names:
                if name.endswith((".json", ".jsonl")) or name == "config.yaml":
                    with suppress(OSError):  # replaced while we look
                        stat = os.stat(os.path.join(here, name))
                        found.append((here, name, stat.st_mtime_ns, stat.st_size))
        return sorted(found)


def server(live: LiveReport, *, port: int, every_s: float) -> ThreadingHTTPServer:
    """A server of the page on 127.0.0.1. ``serve_forever`` runs it. A browser reloads every ``every_s`` seconds.

    Raises:
        ReportError: the port is in use, or may not be used.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not is_ours(self.headers.get("Host", ""), LOOPBACK):
                self.send_error(HTTPStatus.FORBIDDEN, "only this machine is answered")
            elif self.path != "/":
                self.send_error(HTTPStatus.NOT_FOUND)
            else:
                content = live.html().encode()
                self.send_response(HTTPStatus.OK)
                for name, value in (HEADERS | {"Refresh": f"{every_s:g}", "Content-Length": str(len(content))}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing, since the page is requested every few seconds."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ReportError(f"port {port} of 127.0.0.1: {error.strerror}; choose another --port, or 0 for any") from None
