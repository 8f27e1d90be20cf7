"""More work than fits, and readers that do not read: refused in time, or cut off, while others are served."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.server.serving import RunningServer, chat_body, wait_until
from tests.server.sockets import Answer, Connection, post

CHAT = "/v1/chat/completions"
RECEIVE_BUFFER = 1 << 16


async def all_at_once(port: int, bodies: list[dict[str, object]]) -> list[Answer]:
    """Send every body over a connection of its own, all before any answer is read."""
    connections = await asyncio.gather(*(Connection.open(port) for _ in bodies))
    await asyncio.gather(*(c.send(post(CHAT, body)) for c, body in zip(connections, bodies, strict=True)))
    answers = await asyncio.gather(*(c.read_answer() for c in connections))
    await asyncio.gather(*(c.close() for c in connections))
    return answers


def check(answer: Answer) -> None:
    """A 200 is a whole answer; a 429 says when to come back."""
    if answer.status == 429:
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.json()["error"]["code"] == "queue_full"
    elif answer.headers["content-type"].startswith("text/event-stream"):
        *chunks, end = answer.events()
        assert end == "[DONE]"
        assert json.loads(chunks[-1])["choices"][0]["finish_reason"] == "length"
        assert b'"error"' not in answer.body
    else:
        assert answer.status == 200
        assert answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("scheduler", ["direct", "asyncio"])
def test_2000_requests_beyond_the_limit_get_429_or_a_whole_answer(
    start_server: Callable[..., RunningServer], scheduler: str
) -> None:
    server = start_server("--max-concurrent-requests", "100", "--null-step-ms", "10", "--http-scheduler", scheduler)
    bodies = [chat_body(max_tokens=40, stream=k % 2 == 0) for k in range(2100)]
    answers = asyncio.run(all_at_once(server.port, bodies))
    for answer in answers:
        check(answer)
    statuses = Counter(answer.status for answer in answers)
    assert statuses.keys() == {200, 429}
    assert statuses[200] >= 100
    wait_until(server.is_idle, "all are out")
    assert server.chat().status_code == 200


def test_ten_requests_for_one_place_get_429_before_the_head(start_server: Callable[..., RunningServer]) -> None:
    """Case 25."""
    server = start_server("--max-concurrent-requests", "2", "--max-num-seqs", "1", "--null-step-ms", "20")
    bodies = [chat_body(max_tokens=50, stream=k % 2 == 0) for k in range(10)]
    answers = asyncio.run(all_at_once(server.port, bodies))
    for answer in answers:
        check(answer)
    assert Counter(answer.status for answer in answers) == {200: 2, 429: 8}
    assert server.get("/health").status_code == 200


def slow_reader(port: int, max_tokens: int, n: int = 1) -> socket.socket:
    """Return a connection with a small receive buffer that asked for a stream; nobody reads it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    connection.connect(("127.0.0.1", port))
    connection.sendall(post(CHAT, chat_body(max_tokens=max_tokens, stream=True, n=n)))
    return connection


def test_health_does_not_wait_behind_readers_that_do_not_read(start_server: Callable[..., RunningServer]) -> None:
    """Case 26, with more such readers than there are threads of any kind."""
    server = start_server()
    readers = [slow_reader(server.port, max_tokens=8000) for _ in range(20)]
    wait_until(lambda: server.metric("num_requests_running") == 0, "the engine is done")
    for _ in range(20):
        assert server.get("/health").elapsed.total_seconds() < 5.0
    assert server.chat().status_code == 200
    for reader in readers:
        reader.close()
    wait_until(server.is_idle, "the readers are gone")


STALL_TIMEOUT_S = 1.0


@pytest.fixture
def impatient_server(start_server: Callable[..., RunningServer]) -> RunningServer:
    server = start_server("--stall-timeout", str(STALL_TIMEOUT_S), "--null-step-ms", "1")
    server.get("/health")  # the connection that stays is part of what is counted
    return server


def test_a_reader_that_stalls_is_cut_off_and_its_sequences_end(impatient_server: RunningServer) -> None:
    """Case 29."""
    server, fds, size = impatient_server, impatient_server.num_fds(), impatient_server.rss()
    with slow_reader(server.port, max_tokens=8000, n=64):
        wait_until(lambda: server.metric("num_requests_running") == 64, "it streams")
        wait_until(server.is_idle, "the sequences are gone", within_s=10 * STALL_TIMEOUT_S)
        wait_until(lambda: server.num_fds() <= fds, "the descriptor is closed")
    assert server.metric("generation_tokens_total") < 64 * 8000 / 2
    assert server.rss() - size < 100e6
    assert server.chat().status_code == 200


def test_an_answer_that_nobody_fetches_is_dropped(impatient_server: RunningServer) -> None:
    """It has left the engine, and waits in granian: more than the kernel takes."""
    server, fds = impatient_server, impatient_server.num_fds()
    with slow_reader(server.port, max_tokens=600, n=64):
        wait_until(lambda: server.metric("e2e_request_latency_seconds_count") == 1, "all is written")
        wait_until(lambda: server.num_fds() <= fds, "the connection is dropped", within_s=10 * STALL_TIMEOUT_S)


def test_a_reader_that_is_merely_slow_is_served(impatient_server: RunningServer) -> None:
    """TCP tells the sender of room again once about half of the receive buffer is free, so that is what counts."""
    with slow_reader(impatient_server.port, max_tokens=8000, n=16) as reader:
        until = time.monotonic() + 3 * STALL_TIMEOUT_S
        while time.monotonic() < until:
            assert reader.recv(RECEIVE_BUFFER)
            time.sleep(STALL_TIMEOUT_S / 10)
        assert impatient_server.metric("num_requests_running") == 16
    wait_until(impatient_server.is_idle, "it has left")
