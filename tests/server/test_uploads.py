"""Bodies that come slowly, never whole, or too many at once: bounded in time and memory, and each gets an answer."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Callable

import pytest

from tests.server.serving import RunningServer, chat_body, wait_until
from tests.server.sockets import Answer, Connection, head_and_body, post

CHAT = "/v1/chat/completions"
LARGE = chat_body("word " * 2_000_000)  # 10 MB
Start = Callable[..., RunningServer]


async def stalled(port: int, body: object, share: float) -> Connection:
    """Return a connection that has sent a head and that share of the body."""
    head, data = head_and_body(CHAT, body)
    connection = await Connection.open(port)
    await connection.send(head + data[: int(len(data) * share)])
    return connection


@pytest.mark.parametrize("scheduler", ["direct", "asyncio"])
def test_uploads_that_stall_end_with_408_and_leave_no_memory(start_server: Start, scheduler: str) -> None:
    server = start_server("--body-timeout", "1", "--http-scheduler", scheduler)
    server.chat()
    fds, sizes = server.num_fds(), []

    async def six() -> list[Answer]:
        connections = [await stalled(server.port, LARGE, 0.9) for _ in range(6)]
        await asyncio.to_thread(wait_until, lambda: server.metric("http_requests_inside") == 6, "they are counted")
        answers = [await connection.read_answer() for connection in connections]
        assert all([await connection.is_closed_by_peer() for connection in connections])
        for connection in connections:
            await connection.close()
        return answers

    for _ in range(3):
        for answer in asyncio.run(six()):
            assert (answer.status, answer.json()["error"]["code"]) == (408, "body_timeout")
        wait_until(server.is_idle, "all are out")
        wait_until(lambda: server.num_fds() <= fds, "the descriptors are closed")
        assert server.metric("http_body_bytes") == 0
        sizes.append(server.rss())
    assert sizes[-1] - sizes[0] < 60e6  # of 108 MB in two rounds; allocators keep some
    assert server.chat().status_code == 200


def test_bodies_beyond_the_memory_for_them_get_429(start_server: Start) -> None:
    server = start_server("--max-body-mb", "12", "--body-memory-gb", "0.024")  # two of them

    async def three() -> tuple[Answer, Answer]:
        first, second = [await stalled(server.port, LARGE, 0.5) for _ in range(2)]
        await asyncio.to_thread(wait_until, lambda: server.metric("http_bodies_reading") == 2, "they are counted")
        async with await stalled(server.port, LARGE, 0.0) as third:
            refused = await third.read_answer()
        async with await Connection.open(server.port) as fourth:
            small = await fourth.ask(CHAT, chat_body())
        await first.close()
        await second.close()
        return refused, small

    refused, small = asyncio.run(three())
    assert refused.status == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert small.status == 200
    wait_until(server.is_idle, "all are out")
    assert server.metric("http_body_bytes") == 0


def test_a_body_that_is_not_whole_when_the_server_stops_is_answered(start_server: Start) -> None:
    server = start_server("--shutdown-timeout", "0.5")

    async def stop_meanwhile() -> Answer:
        async with await stalled(server.port, chat_body("word " * 1000), 0.5) as connection:
            await asyncio.to_thread(wait_until, lambda: server.metric("http_bodies_reading") == 1, "it is counted")
            server.send_signal(signal.SIGTERM)
            return await connection.read_answer()

    answer = asyncio.run(stop_meanwhile())
    assert (answer.status, answer.json()["error"]["code"]) == (503, "draining")
    assert server.stop() == 0


@pytest.mark.parametrize("scheduler", ["direct", "asyncio"])
def test_bodies_that_arrive_around_their_deadline_get_one_answer_each(start_server: Start, scheduler: str) -> None:
    """The last piece races with the refusal, 300 times."""
    server = start_server("--body-timeout", "0.5", "--http-scheduler", scheduler)
    rng = random.Random(7)

    async def one(delay_s: float) -> int:
        head, data = head_and_body(CHAT, chat_body())
        async with await Connection.open(server.port) as connection:
            await connection.send(head + data[:20])
            await asyncio.sleep(delay_s)
            try:
                await connection.send(data[20:])
                return (await connection.read_answer()).status
            except (ConnectionError, asyncio.IncompleteReadError):  # its rest met a closed connection
                return 408

    async def many() -> Counter[int]:
        return Counter(await asyncio.gather(*(one(0.4 + 1.4 * rng.random()) for _ in range(300))))

    statuses = asyncio.run(many())
    assert statuses.keys() <= {200, 408}
    assert statuses[408] >= 1
    wait_until(server.is_idle, "all are out")
    assert server.metric("http_bodies_reading") == 0
    assert server.metric("http_body_bytes") == 0


def test_small_requests_that_find_no_place_are_read_before_they_are_refused(start_server: Start) -> None:
    server = start_server("--max-concurrent-requests", "1")

    async def two() -> Answer:
        first = await stalled(server.port, chat_body(), 0.5)
        await asyncio.to_thread(wait_until, lambda: server.metric("http_requests_inside") == 1, "it is counted")
        async with await Connection.open(server.port) as second:
            head, data = head_and_body(CHAT, chat_body("word " * 5000))
            await second.send(head)
            await asyncio.sleep(0.1)
            await second.send(data)
            refused = await second.read_answer()
            await first.close()
            await asyncio.to_thread(wait_until, server.is_idle, "the place is free")
            await second.send(post(CHAT, chat_body()))  # the connection has survived
            assert (await second.read_answer()).status == 200
        return refused

    assert asyncio.run(two()).status == 429
