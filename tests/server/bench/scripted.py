"""A server of a few lines that answers with given bytes, to see what the generator makes of them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Self


def sse(*contents: str) -> bytes:
    """Return an event for each content, as vLLM and we write them."""
    return b"".join(b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % text.encode() for text in contents)


def chunked(*chunks: bytes) -> bytes:
    """Return a whole streamed answer."""
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


class ScriptedServer:
    """Answers every request on every connection with `pieces`, each written on its own."""

    def __init__(
        self, pieces: Sequence[bytes], *, before: Callable[[], object] = lambda: None, closes: bool = False
    ) -> None:
        self._pieces, self._before, self._closes = pieces, before, closes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.num_connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # or the thread in accept keeps it open
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as reader:
            while reader.readline():
                length = 0
                while (line := reader.readline()) not in (b"\r\n", b""):
                    name, _, value = line.partition(b":")
                    length = int(value) if name == b"content-length" else length
                reader.read(length)
                self._before()
                try:
                    for piece in self._pieces:
                        connection.sendall(piece)
                        if len(self._pieces) > 1:
                            time.sleep(0.001)  # so that it is a read of its own
                except OSError:
                    return
                if self._closes:
                    return
