"""What a supervisor and its processes say to each other: JSON, a message a packet, over a pair of sockets.

The pair is made before the fork, so it has no name, and its end is how either side learns of the other's death.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import threading
from collections.abc import Mapping
from typing import Any

_MAX_MESSAGE = 1 << 20
_PR_SET_PDEATHSIG = 1


class Channel:
    """One side of the pair. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Return the side of the parent, which never blocks, and that of the child."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_MESSAGE)
        return cls(ours), cls(theirs)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, kind: str, **fields: object) -> bool:
        """Send a message; False if the other side has gone, or does not listen."""
        data = json.dumps({"kind": kind, **fields}).encode()
        with self._lock:
            try:
                self._end.send(data)
            except OSError:
                return False
        return True

    def receive(self) -> Mapping[str, Any] | None:
        """Return the next message, {} if there is none yet, None if the other side has gone."""
        try:
            data = self._end.recv(_MAX_MESSAGE)
        except BlockingIOError:
            return {}
        except ConnectionError:
            return None
        message: Mapping[str, Any] | None = json.loads(data) if data else None
        return message

    def close(self) -> None:
        self._end.close()


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent does, however that happens."""
    with contextlib.suppress(AttributeError):  # not Linux: the end of the channel has to do
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has died meanwhile
        os._exit(1)
