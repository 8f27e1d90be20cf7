"""granian as the HTTP front: one listening socket, one RSGI worker, a pool of Rust threads.

granian's own server class owns the signals and, when it stops, waits for open streams without an end, so the worker is
started here directly. That interface is granian's private one: it is used in this file only, and `check_granian` says
at start whether it is the one that we know.

Two schedulers turn granian's callback into an `Exchange`:
    - `direct`: the handler runs at once on the Rust thread that read the request, and so do the callbacks of body
      and disconnect; no event loop is touched. Handlers never block.
    - `asyncio`: granian's documented path, a coroutine a request on an event loop.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable
from contextvars import Context
from pathlib import Path
from typing import Any

from granian import _granian
from granian._futures import _future_watcher_wrapper, _new_cbscheduler
from granian.constants import SSLProtocols
from granian.http import HTTP1Settings

from ftserve.engine.threads import name_this_thread
from ftserve.server.config import ServerConfig, Tls
from ftserve.server.exchange import Exchange, Inline

log = logging.getLogger("ftserve.http")

Handler = Callable[[Exchange], None]

_native: Any = _granian  # its type stubs describe older signatures

BACKLOG = 2048
MAX_CONNECTIONS = 16384  # granian's backpressure counts connections
_START_TIMEOUT_S = 10.0
_KNOWN_GRANIAN = "2.7."


class HttpServer:
    """The listening socket and the worker behind it."""

    def __init__(self, config: ServerConfig, handle: Handler) -> None:
        self._config = config
        self._handle = handle
        self._socket: socket.socket | None = None
        self._stop = _native.WorkerSignal()
        self._thread = threading.Thread(target=self._run, name="ftserve-http", daemon=True)

    def bind(self, listener: socket.socket | None = None) -> str:
        """Take the configured address, or a socket that is bound already; return it as clients write it.

        Raises:
            OSError: the address is in use, or is not ours.
        """
        config = self._config
        self._socket = bind(config) if listener is None else listener
        if config.uds is not None:
            return f"unix:{config.uds}"
        scheme = "http" if config.tls is None else "https"
        host = f"[{config.host}]" if ":" in config.host else config.host
        return f"{scheme}://{host}:{self._socket.getsockname()[1]}"

    def start(self) -> None:
        """Begin to accept; returns once connections are taken. After `bind`.

        Raises:
            RuntimeError: granian did not come up.
        """
        assert self._socket is not None, "bind first"
        self._thread.start()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            with socket.socket(self._socket.family, socket.SOCK_STREAM) as probe:
                try:
                    probe.connect(self._socket.getsockname())
                except ConnectionRefusedError:  # bound, and not listening yet
                    time.sleep(0.01)
                else:
                    return
        raise RuntimeError("granian did not start")

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def stop(self, timeout_s: float) -> bool:
        """Stop accepting and wait for open connections; False if some are left after `timeout_s`."""
        self._stop.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        name_this_thread("ft-http")  # the thread that calls handlers; those that read and write are granian's
        assert self._socket is not None, "bind first"
        direct = self._config.http_scheduler == "direct"
        loop = InlineLoop() if direct else asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        is_unix = self._socket.family == socket.AF_UNIX
        worker = _native.RSGIWorker(
            1,
            _native.SocketHolder(self._socket.fileno(), is_unix, BACKLOG),
            None,
            threads=self._config.threads.http,
            backpressure=MAX_CONNECTIONS,
            http_mode="1",
            http1_opts=HTTP1Settings(),
            metrics=(None, None),
            **_tls_options(self._config.tls),
        )
        scheduler = (
            _direct_scheduler(loop, self._handle)
            if direct
            else _new_cbscheduler(loop, _future_watcher_wrapper(self._serve), impl_asyncio=True)
        )
        serve = worker.serve_mtr_uds if is_unix else worker.serve_mtr
        serve(scheduler, loop, self._stop)

    async def _serve(self, scope: Any, proto: Any) -> None:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()

        def end() -> None:
            loop.call_soon_threadsafe(_resolve, ended)

        self._handle(Exchange(scope, proto, end))
        await ended


def bind(config: ServerConfig, *, is_shared: bool = False) -> socket.socket:
    """Return a socket, not listening yet, at the configured address; `is_shared` with other sockets of that kind.

    Raises:
        OSError: the address is in use, or is not ours.
    """
    if config.uds is not None:
        return _bind_unix(config.uds)
    return _bind_tcp(config.host, config.port, config.stall_timeout_s, is_shared=is_shared)


def _bind_tcp(host: str, port: int, stall_timeout_s: float, *, is_shared: bool) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Inherited by each connection: the kernel drops a peer that takes no byte for so long, the send then fails, and the
    # request is cancelled. granian's send queue gives no sign of a slow reader itself.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_timeout_s * 1000))
    try:
        listener.bind((host, port))
    except OSError as exc:
        listener.close()
        raise OSError(exc.errno, exc.strerror, f"{host}:{port}") from None
    listener.setblocking(False)
    return listener


def _bind_unix(path: Path) -> socket.socket:
    """Take a Unix socket; a file that a server left behind is replaced, one that a server listens on is not."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            pass
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise OSError(errno.EADDRINUSE, "Address already in use", str(path))
    listener.bind(str(path))
    listener.setblocking(False)
    return listener


def _tls_options(tls: Tls | None) -> dict[str, Any]:
    if tls is None:
        return {}
    return {
        "ssl_enabled": True,
        "ssl_cert": str(tls.certificate.resolve()),
        "ssl_key": str(tls.key.resolve()),
        "ssl_protocol_min": str(SSLProtocols.tls12),
    }


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class InlineLoop(asyncio.SelectorEventLoop):
    """An event loop that runs callbacks marked `Inline` on the thread that reports them, without a hop."""

    def call_soon_threadsafe(  # type: ignore[override]  # the same, without its variadic generics
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Any:
        if type(callback) is Inline:
            return callback(*args)  # granian drops what it gets
        return super().call_soon_threadsafe(callback, *args, context=context)

    def call_soon(  # type: ignore[override]  # as above
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Any:
        if type(callback) is Inline:  # a future that was cancelled; this loop never runs, what it queued would stay
            return callback(*args)
        return super().call_soon(callback, *args, context=context)


def _direct_scheduler(loop: asyncio.AbstractEventLoop, handle: Handler) -> Any:
    """Return a scheduler that calls the handler on granian's own thread, instead of making a task of a coroutine."""

    def schedule(watcher: Any) -> None:
        try:
            handle(Exchange(watcher.scope, watcher.proto, watcher.done))
        except BaseException as exc:  # granian must learn of it, or the connection would hang
            log.exception("an HTTP handler raised")
            watcher.err(exc)

    scheduler = _native.CallbackScheduler(loop, None, None, None, None)
    scheduler._schedule_fn = schedule  # noqa: SLF001 - see the module's docstring
    return scheduler


def check_granian() -> str | None:
    """Return why the private interface is not the one that we know, or None."""
    import granian

    if not granian.__version__.startswith(_KNOWN_GRANIAN):
        return f"granian {granian.__version__} is not {_KNOWN_GRANIAN}x"
    missing = [name for name in ("RSGIWorker", "SocketHolder", "WorkerSignal") if not hasattr(_native, name)]
    if missing or not hasattr(_native.CallbackScheduler, "_schedule_fn"):
        return f"granian {granian.__version__} lacks {', '.join(missing) or 'CallbackScheduler._schedule_fn'}"
    return None
