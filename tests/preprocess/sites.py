"""A web server in this process that behaves as badly as a test wants."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATIENCE_S = 60


class Site(BaseHTTPRequestHandler):
    """Answers by path; what it does is in `pages`."""

    protocol_version = "HTTP/1.1"
    pages: dict[str, Callable[[Site], None]]
    seen: list[str]

    def do_GET(self) -> None:
        self.seen.append(self.path)
        page = self.pages.get(self.path, not_found)
        try:
            page(self)
        except OSError:  # the fetcher has gone
            self.close_connection = True

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content_length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def serving(pages: dict[str, Callable[[Site], None]]) -> Iterator[tuple[str, list[str]]]:
    seen: list[str] = []
    handler = type("Handler", (Site,), {"pages": pages, "seen": seen})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", seen
    server.shutdown()
    server.server_close()
    thread.join(PATIENCE_S)


def not_found(site: Site) -> None:
    site.answer(404, b"nothing")


def silent(_site: Site) -> None:
    """Answer nothing for longer than a test waits."""
    threading.Event().wait(10)


def endless(site: Site) -> None:
    site.send_response(200)
    site.end_headers()
    while True:
        site.wfile.write(bytes(1 << 16))
