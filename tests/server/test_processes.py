"""The server as processes: each of them killed in turn under load, and what the clients get and what is left then."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.serving import COMMAND, NULL_ENGINE, RunningServer, chat_body, environment, wait_until
from tests.server.sockets import Answer, Connection, post

CHAT = "/v1/chat/completions"
PROCESSES = ("--front-ends", "2", "--null-step-ms", "10")
SHARED = Path("/dev/shm")
NUM_STREAMS = 50


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    """Two front ends and an engine with steps of 10 ms."""
    with RunningServer(tmp_path / "log", *NULL_ENGINE, *PROCESSES) as server:
        yield server


def folders() -> set[Path]:
    return set(SHARED.glob(f"ftserve-{os.getuid()}-*"))


def folder_of(server: RunningServer) -> Path:
    """Return the server's private folder: the one whose lock it holds open."""
    links = (str(link.readlink()) for link in Path(f"/proc/{server.process.pid}/fd").iterdir())
    return next(Path(link).parent for link in links if link.startswith(f"{SHARED}/ftserve-"))


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def open_streams(port: int, max_tokens: int) -> list[Connection]:
    """Return connections that have each received the first chunk of a stream."""
    connections = [await Connection.open(port) for _ in range(NUM_STREAMS)]
    for connection in connections:
        await connection.send(post(CHAT, chat_body(max_tokens=max_tokens, stream=True)))
    for connection in connections:
        status, _ = await connection.read_head()
        assert status == 200
        assert await connection.read_chunk()
    return connections


async def read_end(connection: Connection) -> list[str] | None:
    """Return the last two events of a stream; None if it was cut."""
    try:
        return Answer(200, {}, await connection.read_stream()).events()[-2:]
    except (ConnectionError, asyncio.IncompleteReadError):
        return None
    finally:
        with contextlib.suppress(ConnectionError):
            await connection.close()


def kill_under_load(server: RunningServer, name: str, max_tokens: int) -> list[list[str] | None]:
    """Kill a process while streams are open; return their ends."""

    async def run() -> list[list[str] | None]:
        connections = await open_streams(server.port, max_tokens)
        pid = server.processes()[name]
        os.kill(pid, signal.SIGKILL)
        return await asyncio.gather(*(read_end(connection) for connection in connections))

    return asyncio.run(run())


def answers_again(server: RunningServer) -> bool:
    with contextlib.suppress(Exception):
        return server.get("/ready").status_code == 200 and server.chat().status_code == 200
    return False


def is_whole(server: RunningServer) -> bool:
    """Whether every process is there, answers and has nothing left to do."""
    reports = server.get("/metrics").text.count("ftserve_http_requests_inside{")
    return len(server.processes()) == 4 and reports == 2 and server.is_idle()


def test_the_parts_are_processes_of_one_server(server: RunningServer) -> None:
    assert set(server.processes()) == {"server", "ft-engine-host", "ft-front-0", "ft-front-1"}
    assert "processes: 2 front ends with" in server.log()
    folder = folder_of(server)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_front_end_that_is_killed_takes_only_its_own_streams(server: RunningServer) -> None:
    ends = kill_under_load(server, "ft-front-0", max_tokens=150)
    cut = [end for end in ends if end is None]
    whole = [end for end in ends if end is not None]
    assert 0 < len(cut) < NUM_STREAMS
    assert {json.loads(last)["choices"][0]["finish_reason"] for last, _ in whole} == {"length"}
    wait_until(lambda: is_whole(server), "another front end is there and nothing is left", 30)
    assert len(list(folder_of(server).glob("front-*"))) == 2
    assert server.chat().status_code == 200


def test_an_engine_that_is_killed_is_said_to_all_and_replaced(server: RunningServer) -> None:
    for end in kill_under_load(server, "ft-engine-host", max_tokens=2000):
        assert end is not None
        error, done = end
        assert json.loads(error)["error"]["code"] == "engine_dead"
        assert done == "[DONE]"
    wait_until(lambda: answers_again(server), "another engine serves", 30)
    wait_until(lambda: is_whole(server), "nothing is left", 30)
    assert len(list(folder_of(server).glob("engine-*"))) == 1


def test_nothing_outlives_a_supervisor_that_is_killed(server: RunningServer, tmp_path: Path) -> None:
    pids, folder = server.processes().values(), folder_of(server)
    ends = kill_under_load(server, "server", max_tokens=2000)
    assert ends == [None] * NUM_STREAMS
    wait_until(lambda: all(has_ended(pid) for pid in pids), "the others are gone")
    assert folder.exists()
    with RunningServer(tmp_path / "next", *NULL_ENGINE, *PROCESSES) as successor:
        assert not folder.exists()
        assert successor.stop() == 0
    assert folder not in folders()


def test_engine_failure_may_end_the_server(tmp_path: Path) -> None:
    arguments = (*NULL_ENGINE, *PROCESSES, "--on-engine-failure", "exit")
    with RunningServer(tmp_path / "log", *arguments) as server:
        folder = folder_of(server)
        os.kill(server.processes()["ft-engine-host"], signal.SIGKILL)
        assert server.wait() == 1
        assert "its engine has failed" in server.log()
        assert not folder.exists()


def test_a_model_that_is_none_is_said_once() -> None:
    command = [*COMMAND, *NULL_ENGINE, *PROCESSES, "--port", "0", "/no/such/model"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), check=False)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert "no such directory" in line


def test_metrics_and_load_are_those_of_all_front_ends(server: RunningServer) -> None:
    async def ask(count: int) -> None:
        for _ in range(count):  # a connection each, which the kernel gives to either front end
            async with await Connection.open(server.port) as connection:
                assert (await connection.ask(CHAT, chat_body(max_tokens=3))).status == 200

    asyncio.run(ask(24))
    for _ in range(3):
        with httpx.Client(base_url=server.url, trust_env=False) as client:  # its own connection
            text = client.get("/metrics").text
            assert 'ftserve_requests_total{outcome="200"} 24.0' in text
            assert "ftserve_generation_tokens_total 72.0" in text
            assert text.count("ftserve_http_requests_inside{") == 2
            assert client.get("/load").json()["server_load"] == 0
