"""HTTP by hand: for clients that send in pieces, stop reading, or close when it is least convenient."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

TIMEOUT_S = 60.0
RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER on, for no time: close sends RST


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]  # lower case
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[str]:
        """Return the data of each event of a streamed answer."""
        *events, rest = self.body.decode().split("\n\n")
        assert rest == "", "the stream was cut"
        return [event.removeprefix("data: ") for event in events]


def head_and_body(path: str, body: object) -> tuple[bytes, bytes]:
    """Return the two pieces of a POST."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", "host: t", "content-type: application/json", f"content-length: {len(data)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode(), data


def post(path: str, body: object) -> bytes:
    return b"".join(head_and_body(path, body))


class Connection:
    """One connection, kept alive as long as nobody closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> Self:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def read_head(self) -> tuple[int, dict[str, str]]:
        head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), TIMEOUT_S)
        first, *lines = head.decode().rstrip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        return int(first.split()[1]), headers

    async def read_chunk(self) -> bytes:
        """Return the next chunk of a streamed body; b"" at its end."""
        size = int(await asyncio.wait_for(self._reader.readuntil(b"\r\n"), TIMEOUT_S), 16)
        return (await asyncio.wait_for(self._reader.readexactly(size + 2), TIMEOUT_S))[:-2]

    async def read_stream(self) -> bytes:
        """Return the rest of a streamed body."""
        chunks = []
        while chunk := await self.read_chunk():
            chunks.append(chunk)
        return b"".join(chunks)

    async def read_answer(self) -> Answer:
        status, headers = await self.read_head()
        if "content-length" not in headers:
            return Answer(status, headers, await self.read_stream())
        length = int(headers["content-length"])
        return Answer(status, headers, await asyncio.wait_for(self._reader.readexactly(length), TIMEOUT_S))

    async def ask(self, path: str, body: object) -> Answer:
        await self.send(post(path, body))
        return await self.read_answer()

    async def is_closed_by_peer(self) -> bool:
        """Read what is left, and say whether the peer ended the connection rather than time."""
        try:
            await asyncio.wait_for(self._reader.read(), TIMEOUT_S)
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True

    async def close(self, *, with_reset: bool = False) -> None:
        if with_reset:
            sock = self._writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            self._writer.transport.abort()
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
