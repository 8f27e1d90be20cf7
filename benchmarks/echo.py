"""granian with a handler that reads the body and answers: what HTTP alone costs. `python -m benchmarks.echo direct`."""

from __future__ import annotations

import sys
import threading

from ftserve.server.config import ServerConfig
from ftserve.server.exchange import Exchange
from ftserve.server.http import HttpServer
from ftserve.server.problems import JSON_HEADERS


def answer(exchange: Exchange) -> None:
    exchange.read_body(
        then=lambda: exchange.respond(200, JSON_HEADERS, '{"object":"nothing"}'),
        failed=lambda: exchange.respond(400, JSON_HEADERS, "{}"),
    )


def main() -> None:
    server = HttpServer(ServerConfig(port=0, http_scheduler=sys.argv[1]), answer)
    url = server.bind()
    server.start()
    sys.stderr.write(f"serving at {url} (\n")
    sys.stderr.flush()
    threading.Event().wait()


if __name__ == "__main__":
    main()
