"""An engine that dies takes no request with it into silence: each is told, at once and from then on."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.server.dying_server import DEADLY, LOADING, STICKY
from tests.server.serving import (
    INTERPRETER,
    NULL_ENGINE,
    RunningServer,
    chat_body,
    completion_body,
    environment,
    wait_until,
)
from tests.server.sockets import Answer, Connection, post

COMMAND = (*INTERPRETER, str(Path(__file__).with_name("dying_server.py")))
CHAT = "/v1/chat/completions"


@pytest.fixture
def mortal_server(tmp_path: Path) -> Iterator[RunningServer]:
    """Four slots, steps of 5 ms, and a deadly seed."""
    with RunningServer(tmp_path / "log", *NULL_ENGINE, command=COMMAND) as server:
        yield server


def kill_engine(server: RunningServer) -> None:
    assert server.chat(seed=DEADLY).status_code == 503


def test_all_who_wait_are_told_at_once(mortal_server: RunningServer) -> None:
    """Running and queued, streamed and not; those of whom nothing was sent get a 503."""

    async def wait_and_kill() -> list[Answer]:
        first, *others = [await Connection.open(mortal_server.port) for _ in range(16)]
        await first.send(post(CHAT, chat_body(max_tokens=8000, stream=True)))
        head = await first.read_head()
        for k, connection in enumerate(others):
            await connection.send(post(CHAT, chat_body(max_tokens=8000, stream=k % 2 == 0)))
        await asyncio.to_thread(kill_engine, mortal_server)
        async with asyncio.timeout(5):
            answers = [Answer(*head, await first.read_stream())]
            answers += [await connection.read_answer() for connection in others]
        for connection in (first, *others):
            await connection.close()
        return answers

    for answer in asyncio.run(wait_and_kill()):
        if answer.status == 200:
            *_, told, end = answer.events()
            assert end == "[DONE]"
            error = json.loads(told)["error"]
        else:
            assert answer.status == 503
            error = answer.json()["error"]
        assert error["code"] == "engine_dead"
        assert "secret" not in error["message"]


def test_later_requests_and_health_say_that_it_is_dead(mortal_server: RunningServer) -> None:
    assert mortal_server.chat().status_code == 200
    kill_engine(mortal_server)
    for response in (
        mortal_server.get("/health"),
        mortal_server.get("/ready"),
        mortal_server.chat(),
        mortal_server.chat(stream=True),
        mortal_server.http.post("/v1/completions", json=completion_body(["a", "b"], n=4)),
    ):
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "engine_dead"
        assert "retry-after" in response.headers
    assert mortal_server.metric("engine_up") == 0
    assert mortal_server.is_idle()
    assert mortal_server.get("/version").status_code == 200


def test_the_cause_is_in_the_log_and_the_server_stops_as_any_other(mortal_server: RunningServer) -> None:
    kill_engine(mortal_server)
    assert "the device is gone at /dev/secret0" in mortal_server.log()
    assert mortal_server.stop(within_s=10) == 0


def test_an_engine_that_cannot_load_ends_the_server(tmp_path: Path) -> None:
    command = [*COMMAND, LOADING, *NULL_ENGINE, "--port", "0"]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment(), check=False, cwd=tmp_path
    )
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("ftserve: ")
    assert "no memory" in last


def test_a_stuck_step_is_seen_after_a_bound(tmp_path: Path) -> None:
    arguments = (*NULL_ENGINE, "--step-timeout", "0.2", "--shutdown-timeout", "0.1")
    with RunningServer(tmp_path / "log", *arguments, command=COMMAND) as server:
        assert server.get("/health").status_code == 200
        with pytest.raises(httpx.TimeoutException):
            server.http.post(CHAT, json=chat_body(seed=STICKY), timeout=0.5)
        wait_until(lambda: server.get("/health").status_code == 503, "the stuck step is seen")
        assert server.get("/health").json()["error"]["code"] == "engine_stuck"
        assert server.stop(within_s=10) == 0


@pytest.mark.parametrize("seed", [DEADLY, STICKY])
def test_a_failed_engine_may_end_the_server(tmp_path: Path, seed: int) -> None:
    arguments = (*NULL_ENGINE, "--on-engine-failure", "exit", "--step-timeout", "0.2", "--shutdown-timeout", "0.2")
    with RunningServer(tmp_path / "log", *arguments, command=COMMAND) as server:
        with suppress(httpx.HTTPError):  # a stuck engine answers nobody
            assert server.chat(seed=seed).status_code == 503
        assert server.process.wait(30) == 1
        assert "its engine has failed" in server.log()
