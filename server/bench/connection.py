"""One HTTP/1.1 connection of the generator, without waiting: bytes out, and an answer's pieces in as they come.

An event loop's stream readers cost as much per token as the server does, so a connection is a socket in an epoll set
and a parser that looks at each read once.
"""

from __future__ import annotations

import os
import re
import socket

from ftserve.server.bench.results import Record

_READ_BYTES = 1 << 18
_CONTENT = re.compile(rb'"(?:content|text|reasoning|reasoning_content|arguments)": ?"[^"]')
_MAX_HEAD_BYTES = 1 << 16


class Connection:
    """A keep-alive connection that carries one request at a time.

    The caller asks for `send` when the socket takes bytes and for `receive` when it has some; `record` is set while a
    request is under way.
    """

    __slots__ = (
        "_carry",
        "_is_chunked",
        "_is_connected",
        "_left",
        "_rest",
        "_state",
        "_tail",
        "_unsent",
        "fd",
        "is_reusable",
        "record",
        "sock",
    )

    def __init__(self, address: tuple[str, int]) -> None:
        """Begin to connect, to an address with its host resolved; the first `send` waits for it.

        Raises:
            OSError: nobody listens there.
        """
        self.sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.setblocking(False)
        self._is_connected = False
        try:
            self.sock.connect(address)
        except BlockingIOError:  # it goes on by itself: a server that does not accept must not hold up all others
            pass
        except OSError:
            self.sock.close()
            raise
        self.fd = self.sock.fileno()
        self.record: Record | None = None
        self.is_reusable = True
        self._unsent = memoryview(b"")
        self._reset()

    def _reset(self) -> None:
        self._state = self._head
        self._rest = b""  # bytes that the parser has not taken yet
        self._left = 0  # of the body or of the chunk; -1: until the end of the connection
        self._is_chunked = False
        self._carry = b""  # a line of events that is not whole yet
        self._tail = b""  # the last piece that held counts

    def begin(self, record: Record, request: bytes) -> bool:
        """Take the connection for a request; True if it is sent already, else `send` goes on."""
        self._reset()
        self.record = record
        self._unsent = memoryview(request)
        return self.send()

    def send(self) -> bool:
        """Send what the socket takes; True once all is sent.

        Raises:
            OSError: the connection is broken.
        """
        if not self._is_connected:
            error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
        try:
            while self._unsent:
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except BlockingIOError:  # it takes no more for now, or is not connected yet
            return False
        self._is_connected = True
        return True

    def receive(self, now: float) -> bool:
        """Read once and look at what came; True when the answer is whole.

        Raises:
            OSError: the connection broke within the answer.
            ValueError: what came is no HTTP.
        """
        assert self.record is not None, "nothing was asked"
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.is_reusable = False
            if self._left == -1 and self._state == self._plain:
                return self._finish()
            raise ConnectionResetError("the server closed the connection")
        self._rest = self._rest + data if self._rest else data
        return self._state(now)

    def is_stale(self) -> bool:
        """Tell whether the server has closed this idle connection, or sent what nobody asked for."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        self.sock.close()

    def _head(self, now: float) -> bool:
        head, found, rest = self._rest.partition(b"\r\n\r\n")
        if not found:
            if len(head) > _MAX_HEAD_BYTES:
                raise ValueError("the answer's head has no end")
            return False
        assert self.record is not None
        start, _, lines = head.partition(b"\r\n")
        if not start.startswith(b"HTTP/1."):
            raise ValueError("the answer is no HTTP")
        self.record.status = int(start[9:12])
        fields = b"\r\n" + lines.lower() + b"\r\n"
        self._is_chunked = b"\r\ntransfer-encoding: chunked\r\n" in fields
        self.is_reusable = b"\r\nconnection: close\r\n" not in fields
        self._rest = rest
        if self._is_chunked:
            self._left, self._state = 0, self._chunks
        else:
            _, found, length = fields.partition(b"\r\ncontent-length:")
            self._left, self._state = int(length.split(b"\r\n", 1)[0]) if found else -1, self._plain
        return self._state(now)

    def _plain(self, now: float) -> bool:
        data, self._rest = self._rest, b""
        self._take(data, now)
        if self._left > 0:
            self._left -= len(data)
        return self._finish() if self._left == 0 else False

    def _chunks(self, now: float) -> bool:
        """Take chunks off `_rest`; `_left` counts the bytes of the open one with its line end."""
        data, position = self._rest, 0
        pieces: list[bytes] = []
        while position < len(data):
            if not self._left:
                end = data.find(b"\r\n", position)
                if end < 0:
                    break
                size = int(data[position:end].split(b";", 1)[0], 16)
                if size == 0:
                    if not data.startswith(b"\r\n", end + 2):
                        break
                    self._take(b"".join(pieces), now)
                    return self._finish()
                position, self._left = end + 2, size + 2
            taken = min(self._left, len(data) - position)
            self._left -= taken
            line_end = max(0, 2 - self._left)  # it may have been cut in two
            pieces.append(data[position : position + max(0, taken - line_end)])
            position += taken
        self._rest = data[position:]
        self._take(pieces[0] if len(pieces) == 1 else b"".join(pieces), now)
        return False

    def _take(self, data: bytes, now: float) -> None:
        """Look for content and counts in whole lines of events."""
        text = self._carry + data if self._carry else data
        end = text.rfind(b"\n") + 1
        self._carry = text[end:]
        if not end:
            return
        if end != len(text):
            text = text[:end]
        record = self.record
        assert record is not None
        count = len(_CONTENT.findall(text))
        if count:
            record.content_times.append(now)
            record.tokens += count
        if b'"completion_tokens"' in text or b'data: {"error"' in text:
            self._tail = text

    def _finish(self) -> bool:
        record = self.record
        assert record is not None
        # An answer that is not streamed is one line without an end.
        tail = self._tail or self._carry
        if record.status != 200:
            record.failure = f"status {record.status}"
        elif b'data: {"error"' in tail:
            record.failure = "error event"
        record.tokens = _count(tail, b'"completion_tokens"') or record.tokens
        record.prompt_tokens = _count(tail, b'"prompt_tokens"') or 0
        return True


def _count(body: bytes, name: bytes) -> int | None:
    """Return the number after the last `name`, or None."""
    _, found, rest = body.rpartition(name)
    digits = re.match(rb": ?(\d+)", rest) if found else None
    return int(digits.group(1)) if digits else None
