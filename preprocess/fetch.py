"""Files from the network, for clients that may be hostile and servers that may be slow.

One thread with an event loop does all fetching, so that a server that trickles holds no thread of its own.

Guarantees:
    - A connection goes to an address that was checked: the name is resolved once, here, and what was resolved is what
      is connected to, for every redirect too. TLS still checks the name.
    - `then` or `failed` of each fetch is called once, on this thread, unless it was given up before.
    - One fetch at a time of one URL: who asks for it meanwhile gets the same bytes. Nothing is kept afterwards.
    - A fetch ends by its deadline and holds no more than the cap, whatever the server sends.

Which hosts: with a list of domains, those alone, and they may lie in private networks since the operator named them;
without one, every host whose addresses are all public. Link-local addresses, where clouds keep their credentials, are
never connected to. What a client is told is the same for a name that does not exist, an address that is not allowed
and a port that is closed, so nobody can map a network with it. No proxy is used, whatever the environment says.

Shared fields: none. `_fetches` and all else belong to the loop's thread; other threads hand over functions.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import httpcore
import httpx

from ftserve.engine.errors import FtserveError, InvalidRequestError, MediaError
from ftserve.preprocess.sources import Payload

log = logging.getLogger("ftserve.preprocess")

MAX_REDIRECTS = 5
MAX_CONNECTIONS = 64  # each may hold as much as one file may have
_MAX_RESOLVERS = 16  # threads that wait for DNS
_MAX_URL_CHARS = 8192
_HEADERS = [(b"user-agent", b"ftserve"), (b"accept", b"*/*"), (b"accept-encoding", b"identity")]
_ODD = re.compile(r"[\x00-\x20\x7f\\]")  # parsers disagree on what these mean
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Then = Callable[[Payload], None]
Failed = Callable[[FtserveError], None]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_UNREACHABLE = "The host of the URL cannot be reached."


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchRules:
    """What may be fetched, and what it may cost."""

    domains: tuple[str, ...] = ()  # names or addresses; ".example.com" is all below it; none: every public host
    max_bytes: int = 64 << 20
    timeout_s: float = 30.0  # from the request for it to the last byte, waiting and redirects included

    def check(self, url: httpx.URL) -> None:
        """Raise InvalidRequestError if nothing may be fetched from this URL's host."""
        if url.scheme not in ("http", "https") or not url.raw_host or url.userinfo or (url.port or 80) > 65535:
            raise InvalidRequestError("The URL must be of the form https://host/path.")
        if self.domains and not self.names(url.raw_host.decode()):
            raise InvalidRequestError("This server fetches nothing from the host of the URL.")

    def names(self, host: str) -> bool:
        """Whether the operator has named this host."""
        host = host.lower().rstrip(".")
        return any(host == domain or (domain.startswith(".") and host.endswith(domain)) for domain in self.domains)

    def allows(self, host: str, address: str) -> bool:
        """Whether to connect to this address of `host`."""
        found = _embedded(ipaddress.ip_address(address.partition("%")[0]))
        if found.is_link_local or found.is_multicast or found.is_unspecified:
            return False
        return found.is_global or self.names(host)


def _embedded(address: Address) -> Address:
    """Return the IPv4 address that an IPv6 address leads to, or the address itself."""
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        return address.ipv4_mapped or address.sixtofour or address
    return address


@dataclass(slots=True, eq=False)
class _Fetch:
    """One URL on its way."""

    url: str
    task: asyncio.Task[None] | None = None
    waiters: list[tuple[Then, Failed]] = field(default_factory=list)


class HttpFetcher:
    """Fetches on a thread of its own. `fetch` may be called from any thread."""

    def __init__(self, rules: FetchRules, on_thread: Callable[[], Callable[[str, float], None]]) -> None:
        """Prepare; `on_thread` is called on the fetching thread and returns what to tell the seconds of a stage."""
        self._rules = rules
        self._on_thread = on_thread
        self._fetches: dict[str, _Fetch] = {}
        self._thread = threading.Thread(target=self._run, name="ftserve-fetch", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Give everything up and stop; False if that took longer. What is asked for later is not told anything."""
        self._hand_over(self._loop.stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def fetch(self, url: str, then: Then, failed: Failed) -> Callable[[], None]:
        """Call `then` or `failed` later, on the fetching thread; return a function that gives up.

        Raises:
            InvalidRequestError: nothing may be fetched from this URL.
        """
        self._rules.check(_parse(url))
        waiter = (then, failed)
        self._hand_over(self._join, url, waiter)
        return partial(self._hand_over, self._leave, url, waiter)

    def num_fetching(self) -> int:
        return len(self._fetches)

    def _hand_over(self, function: Callable[..., None], *arguments: object) -> None:
        """Run something on the loop's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server stops
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._observe = self._on_thread()
        self._loop.set_default_executor(ThreadPoolExecutor(_MAX_RESOLVERS, "ftserve-dns"))
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(trust_env=False),
            max_connections=MAX_CONNECTIONS,
            max_keepalive_connections=MAX_CONNECTIONS // 4,
            keepalive_expiry=15.0,
            network_backend=_CheckedBackend(self._rules),
        )
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._pool.aclose())
        self._loop.close()

    def _join(self, url: str, waiter: tuple[Then, Failed]) -> None:
        fetch = self._fetches.get(url)
        if fetch is None:
            self._fetches[url] = fetch = _Fetch(url)
            fetch.task = self._loop.create_task(self._get(fetch))
        fetch.waiters.append(waiter)

    def _leave(self, url: str, waiter: tuple[Then, Failed]) -> None:
        fetch = self._fetches.get(url)
        if fetch is None or waiter not in fetch.waiters:
            return
        fetch.waiters.remove(waiter)
        if not fetch.waiters:
            del self._fetches[url]
            assert fetch.task is not None, "it was joined"
            fetch.task.cancel()

    async def _get(self, fetch: _Fetch) -> None:
        began = time.monotonic()
        error: FtserveError
        try:
            data = await self._within_deadline(fetch.url)
        except FtserveError as exc:
            error = exc
        except Exception as exc:  # noqa: BLE001 - whatever a library makes of what a server sends
            log.info("a URL could not be fetched: %s", type(exc).__name__)
            error = MediaError("The URL cannot be fetched.")
        else:
            self._observe("media_fetch", time.monotonic() - began)
            for then, _ in self._land(fetch):
                then((data,))
            return
        for _, failed in self._land(fetch):
            failed(error)

    def _land(self, fetch: _Fetch) -> Sequence[tuple[Then, Failed]]:
        if self._fetches.get(fetch.url) is fetch:
            del self._fetches[fetch.url]
        return fetch.waiters

    async def _within_deadline(self, url: str) -> bytes:
        try:
            async with asyncio.timeout(self._rules.timeout_s):
                return await self._follow(_parse(url))
        except TimeoutError as exc:
            raise MediaError(f"The URL was not fetched within {self._rules.timeout_s:g} seconds.") from exc
        except (httpcore.ConnectError, httpcore.ConnectTimeout, OSError) as exc:
            raise MediaError(_UNREACHABLE) from exc

    async def _follow(self, url: httpx.URL) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            self._rules.check(url)
            target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path)
            async with self._pool.stream("GET", target, headers=_HEADERS) as response:
                if response.status == 200:
                    return await self._read(response)
                location = _header(response, b"location")
                if response.status not in (301, 302, 303, 307, 308) or not location:
                    raise MediaError(f"The URL was answered with status {response.status}.")
            url = url.join(_parse(location.decode("ascii", "replace")))
        raise MediaError(f"The URL leads through more than {MAX_REDIRECTS} redirects.")

    async def _read(self, response: httpcore.Response) -> bytes:
        most = self._rules.max_bytes
        if _header(response, b"content-encoding") not in (b"", b"identity"):
            raise MediaError("The URL's server sends compressed data although it was asked not to.")
        length = _header(response, b"content-length")
        chunks, size = [], int(length) if length.isdigit() else 0
        if size <= most:
            size = 0
            async for chunk in response.aiter_stream():
                chunks.append(chunk)
                size += len(chunk)
                if size > most:
                    break
        if size > most:
            raise MediaError(f"The URL has more than {most} bytes.")
        return b"".join(chunks)


class _CheckedBackend(httpcore.AnyIOBackend):
    """Resolves names itself, and connects to addresses that `rules` allow."""

    def __init__(self, rules: FetchRules) -> None:
        self._rules = rules

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the interface's
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))
        if not addresses or not all(self._rules.allows(host, address) for address in addresses):
            raise httpcore.ConnectError
        *first, last = addresses
        for address in first:
            try:
                return await super().connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await super().connect_tcp(last, port, timeout, local_address, socket_options)


def _parse(url: str) -> httpx.URL:
    """Return the URL as the one parser reads it that both the checks and the connection rely on."""
    if len(url) > _MAX_URL_CHARS or _ODD.search(url):
        raise InvalidRequestError("The URL is too long, or has characters that no URL has.")
    try:
        return httpx.URL(url)
    except (httpx.InvalidURL, ValueError) as exc:
        raise InvalidRequestError("The URL cannot be read.") from exc


def _header(response: httpcore.Response, name: bytes) -> bytes:
    return next((value.strip() for key, value in response.headers if key.lower() == name), b"")
