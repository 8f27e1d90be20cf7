"""Clients that go away, at any moment and in any way, leave nothing behind and harm nobody."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator

import pytest

from tests.server.serving import NULL_ENGINE, RunningServer, chat_body, completion_body, wait_until
from tests.server.sockets import Connection, head_and_body, post

CHAT = "/v1/chat/completions"
SCHEDULERS = ("direct", "asyncio")
ENDLESS = 8000  # tokens; at some milliseconds a step nobody waits for them
PROMPT_WORDS = 1500
HTTP_CLIENT_FDS = 1  # the connection that the test itself keeps alive
MAX_GROWTH = 15e6  # bytes, where a leak of 10 KB a request would show twice as much


@pytest.fixture(scope="module")
def slow_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, RunningServer]]:
    """Servers with one slot and steps of 2 ms, by scheduler."""
    folder = tmp_path_factory.mktemp("slow")
    options = (*NULL_ENGINE, "--null-step-ms", "2", "--max-num-seqs", "1", "--http-scheduler")
    with (
        RunningServer(folder / "direct", *options, "direct") as direct,
        RunningServer(folder / "asyncio", *options, "asyncio") as on_asyncio,
    ):
        yield {"direct": direct, "asyncio": on_asyncio}
        assert (direct.stop(), on_asyncio.stop()) == (0, 0)
        assert "Traceback" not in direct.log() + on_asyncio.log()


async def leave_while_sending(port: int, rng: random.Random) -> None:
    head, body = head_and_body(CHAT, chat_body("word " * PROMPT_WORDS))
    sent = head + body
    connection = await Connection.open(port)
    await connection.send(sent[: rng.randrange(1, len(sent))])
    await asyncio.sleep(rng.random() * 0.05)
    await connection.close(with_reset=rng.random() < 0.5)


async def leave_while_waiting(port: int, rng: random.Random) -> None:
    fields = {"max_tokens": ENDLESS - 2 * PROMPT_WORDS, "stream": rng.random() < 0.5, "n": rng.choice([1, 1, 3])}
    connection = await Connection.open(port)
    await connection.send(post(CHAT, chat_body("word " * rng.randrange(PROMPT_WORDS), **fields)))
    await asyncio.sleep(rng.random() * 0.1)
    await connection.close(with_reset=rng.random() < 0.5)


async def leave_while_streaming(port: int, rng: random.Random) -> None:
    connection = await Connection.open(port)
    await connection.send(post(CHAT, chat_body(max_tokens=ENDLESS, stream=True)))
    try:
        await asyncio.wait_for(connection.read_head(), 0.3)  # most are queued and get none
        for _ in range(rng.randrange(1, 4)):
            await connection.read_chunk()
    except TimeoutError:
        pass
    await connection.close(with_reset=rng.random() < 0.5)


async def many_leave(port: int, count: int, seed: int) -> None:
    rng = random.Random(seed)
    ways = (leave_while_sending, leave_while_waiting, leave_while_streaming)
    await asyncio.gather(*(rng.choice(ways)(port, random.Random(rng.random())) for _ in range(count)))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_nothing_is_left_of_200_clients_that_leave(start_server: Callable[..., RunningServer], scheduler: str) -> None:
    """Case 23 at any moment."""
    server = start_server("--null-step-ms", "5", "--max-num-seqs", "8", "--http-scheduler", scheduler)
    fds, sizes = server.num_fds(), []
    for seed in range(8):
        asyncio.run(many_leave(server.port, 200, seed))
        wait_until(server.is_idle, "all requests are gone")
        wait_until(lambda: server.num_fds() <= fds + HTTP_CLIENT_FDS, "all descriptors are closed")
        sizes.append(server.rss())
        assert server.chat().status_code == 200
    assert sizes[-1] - sizes[1] < MAX_GROWTH, sizes
    assert "Traceback" not in server.log()


def test_descriptors_of_bodies_that_never_came_whole_are_closed(null_server: RunningServer) -> None:
    """Case 31: such a connection used to stay in CLOSE-WAIT for ever."""
    head, body = head_and_body(CHAT, chat_body("word " * PROMPT_WORDS))

    async def announce_and_leave() -> None:
        connection = await Connection.open(null_server.port)
        await connection.send(head + body[: len(body) // 2])
        await connection.close()

    async def fifty() -> None:
        await asyncio.gather(*(announce_and_leave() for _ in range(50)))

    null_server.get("/health")
    fds = null_server.num_fds()
    asyncio.run(fifty())
    wait_until(lambda: null_server.num_fds() <= fds, "descriptors are back to the start value", within_s=1.0)


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("with_reset", [True, False])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_slot_is_free_within_a_second(
    slow_servers: dict[str, RunningServer], scheduler: str, is_streamed: bool, with_reset: bool
) -> None:
    """Case 23 while decoding, and case 32 for answers that are not streamed."""
    server = slow_servers[scheduler]
    made = server.metric("generation_tokens_total")

    async def leave_while_decoding() -> None:
        async with await Connection.open(server.port) as connection:
            assert (await connection.ask(CHAT, chat_body(max_tokens=1))).status == 200  # an earlier request
            await connection.send(post(CHAT, chat_body(max_tokens=ENDLESS, stream=is_streamed)))
            if is_streamed:
                await connection.read_head()
            await asyncio.to_thread(wait_until, lambda: server.metric("num_requests_running") == 1, "it runs")
            await connection.close(with_reset=with_reset)

    asyncio.run(leave_while_decoding())
    wait_until(server.is_idle, "the request is gone", within_s=1.0)
    assert server.metric("generation_tokens_total") - made < ENDLESS / 2


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_client_that_leaves_the_queue_frees_its_place(slow_servers: dict[str, RunningServer], scheduler: str) -> None:
    server = slow_servers[scheduler]

    async def leave_the_queue() -> None:
        async with await Connection.open(server.port) as running, await Connection.open(server.port) as queued:
            await running.send(post(CHAT, chat_body(max_tokens=ENDLESS, stream=True)))
            await running.read_head()
            await queued.send(post(CHAT, chat_body(max_tokens=ENDLESS)))
            await asyncio.to_thread(wait_until, lambda: server.metric("num_requests_waiting") == 1, "one waits")
            await queued.close()
            await asyncio.to_thread(wait_until, lambda: server.metric("num_requests_waiting") == 0, "none waits", 1.0)
            assert await running.read_chunk()

    asyncio.run(leave_the_queue())
    wait_until(server.is_idle, "both are gone", within_s=1.0)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_connection_serves_on_after_streams_and_errors(
    slow_servers: dict[str, RunningServer], scheduler: str
) -> None:
    """A disconnect watcher of an earlier request must neither fire for a later one nor swallow its disconnect."""
    server = slow_servers[scheduler]

    async def mix() -> None:
        async with await Connection.open(server.port) as connection:
            for k in range(30):
                assert (await connection.ask(CHAT, chat_body(max_tokens=2, stream=k % 2 == 0))).status == 200
                assert (await connection.ask("/v1/completions", completion_body(max_tokens=0))).status == 400
            await connection.send(post(CHAT, chat_body(max_tokens=ENDLESS)))
            await asyncio.to_thread(wait_until, lambda: server.metric("num_requests_running") == 1, "it runs")

    asyncio.run(mix())
    wait_until(server.is_idle, "the last one was cancelled", within_s=1.0)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_requests_sent_in_one_go_are_answered_in_order(slow_servers: dict[str, RunningServer], scheduler: str) -> None:
    async def pipeline() -> list[int]:
        async with await Connection.open(slow_servers[scheduler].port) as connection:
            await connection.send(b"".join(post("/v1/completions", completion_body(max_tokens=k)) for k in range(1, 6)))
            return [(await connection.read_answer()).json()["usage"]["completion_tokens"] for _ in range(1, 6)]

    assert asyncio.run(pipeline()) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("scheduler", "count"), [("direct", 10_000), ("asyncio", 4_000)])
def test_each_of_thousands_of_requests_in_two_pieces_is_answered(
    start_server: Callable[..., RunningServer], scheduler: str, count: int
) -> None:
    """Case 33: a future that completes while its callback is registered used to lose the wake-up."""
    server = start_server("--http-scheduler", scheduler)
    head, body = head_and_body(CHAT, chat_body(max_tokens=1))

    async def ask(connection: Connection, count: int) -> None:
        for _ in range(count):
            await connection.send(head + body[:40])
            await asyncio.sleep(0.005)
            await connection.send(body[40:])
            assert (await connection.read_answer()).status == 200

    async def ask_from_32(count: int) -> None:
        connections = [await Connection.open(server.port) for _ in range(32)]
        await asyncio.gather(*(ask(connection, count // 32) for connection in connections))
        await asyncio.gather(*(connection.close() for connection in connections))

    asyncio.run(ask_from_32(1_000))
    size = server.rss()
    asyncio.run(ask_from_32(count - 1_000))
    wait_until(server.is_idle, "the last one is out")
    assert server.rss() - size < MAX_GROWTH  # a request that is not freed, but waits for a collection, takes 14 KB
