"""Stopping: what runs is finished or told, in time, and nothing is left; and starting where somebody already is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.server.serving import COMMAND, NULL_ENGINE, RunningServer, chat_body, environment, wait_until
from tests.server.sockets import Answer, Connection, post

CHAT = "/v1/chat/completions"
Start = Callable[..., RunningServer]


async def open_streams(port: int, count: int, max_tokens: int) -> list[Connection]:
    """Return connections that have each received the first chunk of a stream."""
    connections = [await Connection.open(port) for _ in range(count)]
    for connection in connections:
        await connection.send(post(CHAT, chat_body(max_tokens=max_tokens, stream=True)))
    for connection in connections:
        status, _ = await connection.read_head()
        assert status == 200
        assert await connection.read_chunk()
    return connections


async def read_ends(connections: list[Connection]) -> list[list[str]]:
    """Return the last two events of each stream, read to its regular end."""
    ends = []
    for connection in connections:
        ends.append(Answer(200, {}, await connection.read_stream()).events()[-2:])
        await connection.close()
    return ends


def is_draining(server: RunningServer) -> bool:
    return server.get("/ready").status_code == 503


@pytest.mark.parametrize(
    ("scheduler", "number"), [("direct", signal.SIGTERM), ("direct", signal.SIGINT), ("asyncio", signal.SIGTERM)]
)
def test_streams_that_are_open_at_the_deadline_end_with_an_error(
    start_server: Start, scheduler: str, number: signal.Signals
) -> None:
    """Case 28."""
    server = start_server("--shutdown-timeout", "1", "--null-step-ms", "10", "--http-scheduler", scheduler)

    async def signal_and_read() -> list[list[str]]:
        connections = await open_streams(server.port, 10, max_tokens=8000)
        server.send_signal(number)
        return await read_ends(connections)

    began = time.monotonic()
    for error, end in asyncio.run(signal_and_read()):
        assert json.loads(error)["error"]["code"] == "cancelled"
        assert end == "[DONE]"
    assert server.wait() == 0
    assert time.monotonic() - began >= 1.0
    assert "Traceback" not in server.log()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port)).close()


def test_streams_that_end_in_time_are_whole_and_the_server_does_not_wait_longer(start_server: Start) -> None:
    server = start_server("--shutdown-timeout", "60", "--null-step-ms", "10")

    async def signal_and_read() -> list[list[str]]:
        connections = await open_streams(server.port, 10, max_tokens=100)
        server.send_signal(signal.SIGTERM)
        return await read_ends(connections)

    for last, end in asyncio.run(signal_and_read()):
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"
        assert end == "[DONE]"
    assert server.wait(10) == 0


def test_new_requests_are_refused_while_old_ones_are_finished(start_server: Start) -> None:
    server = start_server("--null-step-ms", "10")

    async def ask_while_draining() -> None:
        (stream,) = await open_streams(server.port, 1, max_tokens=300)
        waiting = await Connection.open(server.port)  # known to the server before the signal
        server.send_signal(signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: is_draining(server), "it drains")
        async with waiting, await Connection.open(server.port) as new:
            for connection in (waiting, new):
                answer = await connection.ask(CHAT, chat_body())
                assert (answer.status, answer.headers["retry-after"]) == (503, "10")
                assert answer.json()["error"]["code"] == "draining"
        assert server.get("/health").status_code == 200
        ((last, _),) = await read_ends([stream])
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"

    asyncio.run(ask_while_draining())
    assert server.wait() == 0


def test_a_second_signal_ends_the_wait(start_server: Start) -> None:
    server = start_server("--shutdown-timeout", "600", "--null-step-ms", "10")

    async def signal_twice() -> list[list[str]]:
        connections = await open_streams(server.port, 3, max_tokens=8000)
        server.send_signal(signal.SIGTERM)
        await asyncio.to_thread(wait_until, lambda: is_draining(server), "it drains")
        server.send_signal(signal.SIGINT)
        return await read_ends(connections)

    assert [end for _, end in asyncio.run(signal_twice())] == ["[DONE]"] * 3
    assert server.wait(10) == 0


def test_answers_that_are_not_streamed_get_503_at_the_deadline(start_server: Start) -> None:
    """One runs, two are queued, one has not sent its body."""
    server = start_server("--shutdown-timeout", "0.5", "--null-step-ms", "10", "--max-num-seqs", "1")

    async def signal_and_read() -> list[int]:
        connections = [await Connection.open(server.port) for _ in range(3)]
        for connection in connections:
            await connection.send(post(CHAT, chat_body(max_tokens=8000)))
        async with await Connection.open(server.port) as half:
            await half.send(post(CHAT, chat_body())[:-10])
            await asyncio.to_thread(wait_until, lambda: server.metric("http_requests_inside") == 4, "they are in")
            server.send_signal(signal.SIGTERM)
            statuses = [(await connection.read_answer()).status for connection in (*connections, half)]
        for connection in connections:
            await connection.close()
        return statuses

    assert asyncio.run(signal_and_read()) == [503] * 4
    assert server.wait(10) == 0


def test_readers_that_do_not_read_do_not_hold_the_server(start_server: Start) -> None:
    server = start_server("--shutdown-timeout", "0.5")

    async def stall() -> list[Connection]:
        return await open_streams(server.port, 10, max_tokens=8000)

    with asyncio.Runner() as runner:
        connections = runner.run(stall())
        assert server.stop(within_s=10) == 0
        for connection in connections:
            runner.run(connection.close(with_reset=True))


def test_stopping_under_load_answers_or_refuses_each_request(start_server: Start) -> None:
    server = start_server("--shutdown-timeout", "5", "--null-step-ms", "2")

    async def ask_until_closed() -> list[Answer]:
        answers: list[Answer] = []
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):  # closed between two answers
            async with await Connection.open(server.port) as connection:
                while True:
                    answers.append(await connection.ask(CHAT, chat_body(max_tokens=20, stream=len(answers) % 2 == 0)))
        return answers

    async def load_and_stop() -> list[Answer]:
        clients = [asyncio.create_task(ask_until_closed()) for _ in range(32)]
        await asyncio.to_thread(wait_until, lambda: server.metric("generation_tokens_total") > 2000, "it works")
        server.send_signal(signal.SIGTERM)
        return [answer for answers in await asyncio.gather(*clients) for answer in answers]

    answers = asyncio.run(load_and_stop())
    assert server.wait(10) == 0
    assert {answer.status for answer in answers} == {200, 503}
    streams = [answer for answer in answers if answer.headers["content-type"].startswith("text/event-stream")]
    assert {answer.events()[-1] for answer in streams} == {"[DONE]"}
    assert "Traceback" not in server.log()


def test_an_idle_server_stops_at_once_whoever_is_connected(start_server: Start) -> None:
    server = start_server("--shutdown-timeout", "600")
    assert server.chat().status_code == 200  # and its connection stays open
    with socket.create_connection(("127.0.0.1", server.port)):
        assert server.stop(within_s=5) == 0


def test_a_server_can_be_started_and_stopped_again_and_again_on_one_port(start_server: Start) -> None:
    port = "0"
    for number in (signal.SIGTERM, signal.SIGINT) * 2:
        server = start_server("--port", port)
        port = str(server.port)
        assert server.chat().status_code == 200
        assert server.stop(number) == 0
        assert "Traceback" not in server.log()


def test_a_busy_port_is_said_in_one_line(null_server: RunningServer) -> None:
    command = [*COMMAND, *NULL_ENGINE, "--port", str(null_server.port)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), check=False)
    assert ended.returncode == 1
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("ftserve: ")
    assert str(null_server.port) in line
    assert "in use" in line
    assert null_server.chat().status_code == 200
