"""Fetching ends in time and in bounds, tells nothing of the network, and connects to what was checked."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from ftserve.engine.errors import FtserveError, InvalidRequestError, MediaError
from ftserve.preprocess.fetch import MAX_REDIRECTS, FetchRules, HttpFetcher
from ftserve.preprocess.sources import Payload
from tests.preprocess.sites import PATIENCE_S, Site, endless, serving

LOCAL = ("127.0.0.1", "localhost")


class Outcome:
    def __init__(self) -> None:
        self.payload: Payload | None = None
        self.error: FtserveError | None = None
        self.calls = 0
        self._told = threading.Event()

    def then(self, payload: Payload) -> None:
        self.calls, self.payload = self.calls + 1, payload
        self._told.set()

    def failed(self, error: FtserveError) -> None:
        self.calls, self.error = self.calls + 1, error
        self._told.set()

    def result(self) -> Payload:
        assert self._told.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        assert self.payload is not None
        return self.payload


@contextmanager
def fetching(**rules: Any) -> Iterator[HttpFetcher]:
    chosen = FetchRules(**{"domains": LOCAL, "timeout_s": PATIENCE_S, **rules})
    fetcher = HttpFetcher(chosen, lambda: lambda stage, seconds: None)
    fetcher.start()
    yield fetcher
    assert fetcher.num_fetching() == 0
    assert fetcher.close(PATIENCE_S)


def get(fetcher: HttpFetcher, url: str) -> Payload:
    outcome = Outcome()
    fetcher.fetch(url, outcome.then, outcome.failed)
    return outcome.result()


def test_bytes_arrive_whole_over_connections_that_are_kept() -> None:
    body = bytes(range(256)) * 4000
    with serving({"/a": lambda site: site.answer(200, body)}) as (base, seen), fetching() as fetcher:
        assert [get(fetcher, f"{base}/a") for _ in range(3)] == [(body,)] * 3
        assert seen == ["/a"] * 3


def test_redirects_are_followed_as_far_as_allowed() -> None:
    pages: dict[str, Callable[[Site], None]] = {
        "/a": lambda site: site.answer(302, location="/b"),
        "/b": lambda site: site.answer(307, location=f"http://localhost:{site.connection.getsockname()[1]}/c"),
        "/c": lambda site: site.answer(200, b"here"),
        "/loop": lambda site: site.answer(301, location="/loop"),
        "/file": lambda site: site.answer(302, location="file:///etc/passwd"),
        "/away": lambda site: site.answer(302, location="http://169.254.169.254/latest/meta-data"),
        "/nowhere": lambda site: site.answer(302),
    }
    with serving(pages) as (base, seen), fetching() as fetcher:
        assert get(fetcher, f"{base}/a") == (b"here",)
        with pytest.raises(MediaError, match="redirects"):
            get(fetcher, f"{base}/loop")
        assert seen.count("/loop") == MAX_REDIRECTS + 1
        for path in ("file", "away"):
            with pytest.raises(InvalidRequestError):
                get(fetcher, f"{base}/{path}")
        with pytest.raises(MediaError, match="status 302"):
            get(fetcher, f"{base}/nowhere")


@pytest.mark.parametrize("status", [204, 403, 404, 500])
def test_other_answers_are_told_by_their_status(status: int) -> None:
    pages = {"/": lambda site: site.answer(status)}
    with serving(pages) as (base, _), fetching() as fetcher, pytest.raises(MediaError, match=f"status {status}"):
        get(fetcher, f"{base}/")


def trickle(site: Site) -> None:
    site.send_response(200)
    site.end_headers()
    while True:
        site.wfile.write(b"x")
        time.sleep(0.02)  # slower than any read time-out would notice


def trickle_head(site: Site) -> None:
    for byte in b"HTTP/1.1 200 OK\r\nx: " + b"y" * 10_000:
        site.wfile.write(bytes([byte]))
        time.sleep(0.02)


@pytest.mark.parametrize("page", [trickle, trickle_head])
def test_a_server_that_trickles_is_given_up_at_the_deadline(page: Callable[[Site], None]) -> None:
    late = pytest.raises(MediaError, match=r"within 0\.5 seconds")
    with serving({"/": page}) as (base, _), fetching(timeout_s=0.5) as fetcher, late:
        get(fetcher, f"{base}/")


def test_a_body_beyond_the_cap_is_cut_off() -> None:
    pages: dict[str, Callable[[Site], None]] = {
        "/endless": endless,
        "/announced": lambda site: site.answer(200, b"x", content_length=str(1 << 40)),
        "/fits": lambda site: site.answer(200, bytes(1 << 20)),
    }
    with serving(pages) as (base, _), fetching(max_bytes=1 << 20) as fetcher:
        for path in ("endless", "announced"):
            with pytest.raises(MediaError, match="more than 1048576 bytes"):
                get(fetcher, f"{base}/{path}")
        assert len(get(fetcher, f"{base}/fits")[0]) == 1 << 20


def test_what_is_compressed_is_refused() -> None:
    pages = {"/": lambda site: site.answer(200, b"x", content_encoding="gzip")}
    with serving(pages) as (base, _), fetching() as fetcher, pytest.raises(MediaError, match="compressed"):
        get(fetcher, f"{base}/")


def test_names_closed_ports_and_private_addresses_are_told_alike() -> None:
    messages = set()
    with serving({"/": lambda site: site.answer(200, b"secret")}) as (base, seen), fetching(domains=()) as fetcher:
        port = base.rpartition(":")[2]
        for url in (f"{base}/", f"http://localhost:{port}/", f"http://[::ffff:127.0.0.1]:{port}/", f"http://0:{port}/"):
            with pytest.raises(MediaError) as error:
                get(fetcher, url)
            messages.add(error.value.message)
        assert not seen
    with fetching(domains=("127.0.0.1", "no-such-host.invalid")) as fetcher:
        for url in ("http://127.0.0.1:1/", "http://no-such-host.invalid/"):
            with pytest.raises(MediaError) as error:
                get(fetcher, url)
            messages.add(error.value.message)
    assert messages == {"The host of the URL cannot be reached."}


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:80\\@evil/",
        "http://127.0.0.1@evil/",
        "http://user:pass@127.0.0.1/",
        "http://evil/",
        "http://127.0.0.1.evil/",
        "http:///path",
        "http://",
        "http://[::1/",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1/\r\nHost: evil",
        "http://127.0.0.1/ x",
        "http://xn--/",
        "ftp://127.0.0.1/",
        "http://127.0.0.1/" + "a" * 10_000,
    ],
)
def test_urls_that_could_be_read_in_two_ways_or_lead_elsewhere_are_refused_at_once(url: str) -> None:
    fetcher, outcome = HttpFetcher(FetchRules(domains=LOCAL), lambda: lambda stage, seconds: None), Outcome()
    with pytest.raises(InvalidRequestError):
        fetcher.fetch(url, outcome.then, outcome.failed)


@pytest.mark.parametrize(
    ("address", "public", "named"),
    [
        ("93.184.216.34", True, True),
        ("2606:2800:220:1::1", True, True),
        ("127.0.0.1", False, True),
        ("10.1.2.3", False, True),
        ("192.168.0.1", False, True),
        ("100.64.0.1", False, True),
        ("::1", False, True),
        ("fd00::1", False, True),
        ("::ffff:10.0.0.1", False, True),
        ("64:ff9b::7f00:1", False, True),
        ("2002:7f00:1::", False, True),
        ("169.254.169.254", False, False),
        ("::ffff:169.254.169.254", False, False),
        ("fe80::1%eth0", False, False),
        ("0.0.0.0", False, False),
        ("::", False, False),
        ("224.0.0.1", False, False),
    ],
)
def test_which_addresses_are_connected_to(address: str, public: bool, named: bool) -> None:
    assert FetchRules().allows("host", address) is public
    assert FetchRules(domains=("host",)).allows("host", address) is named


@pytest.mark.parametrize(
    ("host", "is_named"), [("a.com", True), ("A.com.", True), ("x.a.com", False), ("b.org", False), ("c.b.org", True)]
)
def test_which_hosts_a_list_of_domains_names(host: str, is_named: bool) -> None:
    assert FetchRules(domains=("a.com", ".b.org")).names(host) is is_named


def test_one_url_is_fetched_once_for_all_who_ask_meanwhile() -> None:
    release = threading.Event()

    def page(site: Site) -> None:
        assert release.wait(PATIENCE_S)
        site.answer(200, b"shared")

    with serving({"/": page}) as (base, seen), fetching() as fetcher:
        outcomes = [Outcome() for _ in range(20)]
        leavers = [fetcher.fetch(f"{base}/", outcome.then, outcome.failed) for outcome in outcomes]
        for leave in leavers[:10]:
            leave()
        release.set()
        assert {outcome.result() for outcome in outcomes[10:]} == {(b"shared",)}
        assert seen == ["/"]
        assert not any(outcome.calls for outcome in outcomes[:10])


def test_a_fetch_that_nobody_wants_any_more_is_ended() -> None:
    gone = threading.Event()

    def page(site: Site) -> None:
        try:
            endless(site)
        except OSError:
            gone.set()
            raise

    with serving({"/": page}) as (base, seen), fetching(max_bytes=1 << 50) as fetcher:
        outcome = Outcome()
        leave = fetcher.fetch(f"{base}/", outcome.then, outcome.failed)
        while not seen:
            pass
        leave()
        assert gone.wait(PATIENCE_S)
        assert outcome.calls == 0


def test_closing_ends_what_is_being_fetched() -> None:
    with serving({"/": endless}) as (base, seen):
        fetcher = HttpFetcher(FetchRules(domains=LOCAL, max_bytes=1 << 50), lambda: lambda stage, seconds: None)
        fetcher.start()
        fetcher.fetch(f"{base}/", lambda payload: None, lambda error: None)
        while not seen:
            pass
        assert fetcher.close(PATIENCE_S)


def test_names_are_checked_by_tls_and_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with serving({"/": lambda site: site.answer(200, b"x")}) as (base, _), fetching() as fetcher:
        assert get(fetcher, f"{base}/") == (b"x",)
        context = httpx.create_ssl_context(trust_env=False)
        assert context.check_hostname
        assert context.verify_mode is ssl.CERT_REQUIRED
