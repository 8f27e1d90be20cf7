"""A server without work takes no CPU: nothing in it polls."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.server.serving import RunningServer, wait_until

SECONDS = 4.0
MAX_SHARE = 0.01  # of one core


@pytest.mark.parametrize("scheduler", ["direct", "asyncio"])
def test_an_idle_server_uses_less_than_a_hundredth_of_a_core(
    start_server: Callable[..., RunningServer], scheduler: str
) -> None:
    server = start_server("--http-scheduler", scheduler)
    assert server.chat(max_tokens=100).status_code == 200
    wait_until(server.is_idle, "the request is out")
    before, began = server.cpu_seconds(), time.monotonic()
    time.sleep(SECONDS)  # the measurement itself
    assert server.cpu_seconds() - before < MAX_SHARE * (time.monotonic() - began)
