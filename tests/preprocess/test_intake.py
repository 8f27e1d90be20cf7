"""The intake: parts become items in order, siblings are given up, nothing waits with a thread, nobody is lost."""

from __future__ import annotations

import base64
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from ftserve.engine.errors import InvalidRequestError, MediaError, OverloadedError, RequestCancelledError
from ftserve.engine.types import MediaItem, Modality
from ftserve.preprocess.gate import PixelGate
from ftserve.preprocess.gathering import Gathering
from ftserve.preprocess.intake import MediaIntake
from ftserve.preprocess.media import MediaCache, media_key
from ftserve.preprocess.sources import LocalFiles, MediaSource, Payload

PATIENCE_S = 60


@dataclass
class Opened:
    data: bytes
    handler: Handler
    pixels: int = 1

    def decode(self, key: bytes, _is_wanted: Callable[[], bool]) -> MediaItem:
        self.handler.on_decode(self.data)
        patches = np.frombuffer(self.data, np.uint8)[None]
        return MediaItem(modality=Modality.IMAGE, patches=patches, grid=(1, 1, 1), num_tokens=1, digest=key)


class Handler:
    """A family whose files are their own patches."""

    max_bytes = 1000

    def __init__(self) -> None:
        self.marks: Mapping[Modality, int] = {Modality.IMAGE: 0}
        self.on_decode: Callable[[bytes], None] = lambda data: None

    def options(self, source: MediaSource) -> bytes:
        return repr(source.options).encode()

    def open(self, payload: Payload, source: MediaSource) -> Opened:
        if payload[0].startswith(b"bad"):
            raise MediaError("Not a picture.")
        return Opened(payload[0], self)


def source(data: bytes | str, uuid: str | None = None) -> MediaSource:
    url = data if isinstance(data, str) else "data:;base64," + base64.b64encode(data).decode()
    return MediaSource(modality=Modality.IMAGE, param="messages.0.content.0", url=url, uuid=uuid)


def blocking(entered: threading.Event, release: threading.Event) -> Callable[[bytes], None]:
    """Return a decode that says that it has begun, and ends when it may."""

    def on_decode(_data: bytes) -> None:
        entered.set()
        assert release.wait(PATIENCE_S)

    return on_decode


@contextmanager
def running(
    handler: Handler, *, capacity: int = 1 << 20, gate: PixelGate | None = None, threads: int = 2
) -> Iterator[MediaIntake]:
    intake = MediaIntake(
        handler,
        MediaCache(capacity),
        gate or PixelGate(100, 100),
        files=LocalFiles(None),
        fetcher=None,
        num_threads=threads,
        on_thread=lambda role, number: lambda stage, seconds: None,
    )
    intake.start()
    intake.wait_loaded()
    yield intake
    assert intake.close(PATIENCE_S)


def found(gathering: Gathering) -> list[bytes]:
    over = threading.Event()
    gathering.when_over(over.set)
    assert over.wait(PATIENCE_S)
    return [item.own_patches.tobytes() for item in gathering.found()]


def test_items_come_in_the_order_of_their_parts() -> None:
    names = [bytes([65 + k]) for k in range(20)]
    with running(Handler()) as intake:
        assert found(intake.gather([source(name) for name in names], b"")) == names


def test_an_item_is_decoded_once_a_tenant() -> None:
    with running(Handler()) as intake:
        for salt in (b"", b"", b"other"):
            found(intake.gather([source(b"a"), source(b"a")], salt))
        assert intake.cache.statistics().decoded == 2


def test_a_name_alone_refers_to_what_was_sent_with_it() -> None:
    with running(Handler()) as intake:
        found(intake.gather([source(b"a", "cat")], b"t"))
        assert found(intake.gather([source("", "cat")], b"t")) == [b"a"]
        for salt, name in ((b"t", "dog"), (b"", "cat")):
            with pytest.raises(InvalidRequestError) as error:
                found(intake.gather([source("", name)], salt))
            assert error.value.code == "unknown_uuid"


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("data:;base64,YmFk", MediaError),
        ("data:;base64", InvalidRequestError),
        ("data:;base64," + "A" * 2000, InvalidRequestError),
        ("file:///etc/passwd", InvalidRequestError),
        ("https://example.com/a.png", InvalidRequestError),
        ("gopher://x", InvalidRequestError),
        ("x" * 100, InvalidRequestError),
    ],
)
def test_a_bad_part_fails_the_request_and_is_named(url: str, error: type[MediaError | InvalidRequestError]) -> None:
    with running(Handler()) as intake:
        with pytest.raises((MediaError, InvalidRequestError)) as failure:
            found(intake.gather([source(url), source(b"good")], b""))
        assert isinstance(failure.value, error)
        assert failure.value.param == "messages.0.content.0"


def test_siblings_of_a_failed_part_are_not_decoded() -> None:
    handler, decoded, entered, release = Handler(), [], threading.Event(), threading.Event()

    def on_decode(data: bytes) -> None:
        entered.set()
        assert release.wait(PATIENCE_S)
        decoded.append(data)

    handler.on_decode = on_decode
    with running(handler, threads=1) as intake:
        running_one = intake.gather([source(b"first")], b"")
        assert entered.wait(PATIENCE_S)
        failing = intake.gather([source(b"sibling"), source(b"bad")], b"")
        with pytest.raises(MediaError):
            found(failing)
        release.set()
        found(running_one)
        found(intake.gather([source(b"last")], b""))
        assert decoded == [b"first", b"last"]
        assert intake.gate.statistics().pixels_inside == 0


def test_what_one_request_gives_up_another_still_gets() -> None:
    handler, entered, release = Handler(), threading.Event(), threading.Event()
    handler.on_decode = blocking(entered, release)
    with running(handler, threads=1) as intake:
        first = intake.gather([source(b"block")], b"")
        assert entered.wait(PATIENCE_S)
        leaves, stays = (intake.gather([source(b"shared")], b"") for _ in range(2))
        leaves.cancel()
        release.set()
        with pytest.raises(RequestCancelledError):
            found(leaves)
        assert found(stays) == [b"shared"]
        assert found(first) == [b"block"]


def test_what_has_no_room_at_the_gate_is_refused() -> None:
    handler, entered, release = Handler(), threading.Event(), threading.Event()
    handler.on_decode = blocking(entered, release)
    with running(handler, gate=PixelGate(1, 1)) as intake:
        inside = intake.gather([source(b"a")], b"")
        assert entered.wait(PATIENCE_S)
        waiting = intake.gather([source(b"b")], b"")
        while intake.gate.statistics().num_waiting == 0:
            pass
        with pytest.raises(OverloadedError):
            found(intake.gather([source(b"c")], b""))
        release.set()
        assert (found(inside), found(waiting)) == ([b"a"], [b"b"])


def test_a_bug_in_a_decoder_is_an_error_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    handler = Handler()

    def broken(data: bytes) -> None:
        raise ZeroDivisionError

    handler.on_decode = broken
    with running(handler) as intake:
        with pytest.raises(Exception, match="The server failed to process"):
            found(intake.gather([source(b"a")], b""))
        assert intake.gate.statistics().pixels_inside == 0
    assert "could not be processed" in caplog.text


def test_64_requests_with_one_image_decode_it_once() -> None:
    with running(Handler()) as intake:
        assert [found(g) for g in [intake.gather([source(b"a")], b"") for _ in range(64)]] == [[b"a"]] * 64
        assert intake.cache.statistics().decoded == 1


@pytest.mark.parametrize("capacity", [0, 1])
def test_64_images_pass_through_a_cache_of_one(capacity: int) -> None:
    with running(Handler(), capacity=capacity) as intake:
        gatherings = [intake.gather([source(bytes([k]))], b"") for k in range(64)]
        assert [found(g) for g in gatherings] == [[bytes([k])] for k in range(64)]


def test_closing_ends_what_is_on_its_way() -> None:
    handler, entered, release = Handler(), threading.Event(), threading.Event()
    handler.on_decode = blocking(entered, release)
    with running(handler, threads=1) as intake:
        gatherings = [intake.gather([source(bytes([65 + k]))], b"") for k in range(3)]
        assert entered.wait(PATIENCE_S)
        threading.Thread(target=lambda: gatherings[2].when_over(release.set)).start()
        intake.close(PATIENCE_S)
        gatherings.append(intake.gather([source(b"late")], b""))
        for gathering in gatherings:
            with pytest.raises(RequestCancelledError, match="stopping"):
                found(gathering)


def test_many_clients_that_come_and_go() -> None:
    """Each gathering is over once, with its own bytes or with a cancel, and nothing is left behind."""
    handler, num_clients, rounds = Handler(), 6, 60
    barrier = threading.Barrier(num_clients)
    failures: list[object] = []
    with running(handler, capacity=6, gate=PixelGate(3, 10**6), threads=3) as intake:

        def client(number: int) -> None:
            rng = random.Random(number)
            barrier.wait()
            for _ in range(rounds):
                data = [bytes([rng.randrange(10)]) for _ in range(rng.randrange(1, 5))]
                bad = rng.random() < 0.2
                gathering = intake.gather([*map(source, data), *([source(b"bad")] if bad else [])], b"")
                if rng.random() < 0.3:
                    gathering.cancel()
                try:
                    if found(gathering) != data or bad:
                        failures.append(data)
                except (RequestCancelledError, MediaError):
                    pass

        threads = [threading.Thread(target=client, args=(k,)) for k in range(num_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        found(intake.gather([source(b"z")], b""))
        while intake.cache.statistics().num_in_flight or intake.gate.statistics().pixels_inside:
            pass
        assert not failures
        assert not intake._live


def test_a_url_that_was_seen_before_is_found_by_its_text_and_still_gets_a_name() -> None:
    with running(Handler()) as intake:
        found(intake.gather([source(b"a")], b"t"))
        assert found(intake.gather([source(b"a", "cat")], b"t")) == [b"a"]
        assert found(intake.gather([source("", "cat")], b"t")) == [b"a"]
        assert found(intake.gather([source("data:;x;base64,YQ==")], b"t")) == [b"a"]
        assert intake.cache.statistics().decoded == 1


def test_a_uuid_cannot_stand_in_for_a_url() -> None:
    """A client that names its own item like the digest of somebody's URL must not be served in its place."""
    with running(Handler()) as intake:
        url = source(b"victim").url
        for form in ("hex", "raw"):
            digest = media_key((url.encode(),), b"()", b"")
            name = digest.hex() if form == "hex" else digest.decode("latin-1")
            found(intake.gather([source(b"attacker", name)], b""))
        assert found(intake.gather([source(b"victim")], b"")) == [b"victim"]
