"""A request that is not finished by its deadline ends then: with 408, or in its stream if that has begun."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from tests.server.serving import NULL_ENGINE, RunningServer, chat_body, wait_until
from tests.server.sockets import Answer, Connection, post


@pytest.fixture(scope="module", params=["direct", "asyncio"])
def hasty_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with one slot, steps of 20 ms and half a second for a request."""
    options = ("--request-timeout", "0.5", "--null-step-ms", "20", "--max-num-seqs", "1")
    log = tmp_path_factory.mktemp("hasty") / "log"
    with RunningServer(log, *NULL_ENGINE, *options, "--http-scheduler", request.param) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log()


def test_an_answer_that_is_not_finished_is_408(hasty_server: RunningServer) -> None:
    response = hasty_server.chat(max_tokens=1000)
    assert response.status_code == 408
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "deadline_exceeded")
    assert response.elapsed.total_seconds() >= 0.5
    wait_until(hasty_server.is_idle, "its slot is free")


def test_a_stream_that_is_not_finished_ends_with_an_error_event(hasty_server: RunningServer) -> None:
    response = hasty_server.chat(max_tokens=1000, stream=True)
    assert response.status_code == 200
    *chunks, error, end, rest = response.text.split("\n\n")
    assert (end, rest) == ("data: [DONE]", "")
    assert len(chunks) >= 2  # the role, and some text
    assert all(json.loads(chunk.removeprefix("data: "))["choices"] for chunk in chunks)
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    wait_until(hasty_server.is_idle, "its slot is free")


def test_streams_that_wait_for_the_slot_are_408_before_their_head(hasty_server: RunningServer) -> None:
    """The deadlines of all are close together, so that few get the slot after the first and most get no token."""

    async def twenty() -> list[Answer]:
        connections = [await Connection.open(hasty_server.port) for _ in range(20)]
        for connection in connections:
            await connection.send(post("/v1/chat/completions", chat_body(max_tokens=1000, stream=True)))
        answers = [await connection.read_answer() for connection in connections]
        for connection in connections:
            await connection.close()
        return answers

    answers = asyncio.run(twenty())
    assert {answer.status for answer in answers} == {200, 408}
    for answer in answers:
        error = answer.json() if answer.status == 408 else json.loads(answer.events()[-2])
        assert error["error"]["code"] == "deadline_exceeded"
    wait_until(hasty_server.is_idle, "all are out")


def test_one_choice_that_is_late_fails_the_request(hasty_server: RunningServer) -> None:
    """Two choices, one slot: the first would be done in time."""
    assert hasty_server.chat(max_tokens=15, n=2).status_code == 408
    wait_until(hasty_server.is_idle, "its slot is free")


def test_a_request_in_time_is_not_touched(hasty_server: RunningServer) -> None:
    assert hasty_server.chat(max_tokens=5).status_code == 200
