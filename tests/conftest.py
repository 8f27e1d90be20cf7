"""Fixtures of all tests: servers in processes of their own."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.server.serving import NULL_ENGINE, RunningServer


@pytest.fixture(scope="session")
def null_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server without a model for all tests that leave it as they found it."""
    with RunningServer(tmp_path_factory.mktemp("null_server") / "log", *NULL_ENGINE) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log()


@pytest.fixture(scope="session")
def echo_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server that answers with what the prompt has between ⟦ and ⟧, and takes <think> for thoughts."""
    log = tmp_path_factory.mktemp("echo_server") / "log"
    with RunningServer(log, *NULL_ENGINE, "--null-echo", "--reasoning-parser", "think") as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log()


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Callable[..., RunningServer]]:
    """Start servers without a model and with options of the test's own; they end with the test."""
    with ExitStack() as stack:

        def start(
            *arguments: str, env: dict[str, str] | None = None, verify: ssl.SSLContext | bool = False
        ) -> RunningServer:
            log_path = tmp_path / f"server-{len(list(tmp_path.glob('server-*')))}.log"
            return stack.enter_context(RunningServer(log_path, *NULL_ENGINE, *arguments, env=env, verify=verify))

        yield start
