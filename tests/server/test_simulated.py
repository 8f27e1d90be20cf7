"""A server over the simulated device."""

from __future__ import annotations

from collections.abc import Callable

from tests.server.serving import RunningServer


def test_it_answers_and_says_how_long_the_device_worked(start_server: Callable[..., RunningServer]) -> None:
    server = start_server("--engine", "simulated", "--simulate", "a100-8b", "--simulate-replicas", "2")
    assert "device simulated a100-8b + simulated a100-8b" in server.log()
    answer = server.chat("Hello", max_tokens=5).json()
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["choices"][0]["message"]["content"].startswith(" The answer took")
    metrics = server.metrics()
    assert 0.05 < metrics["ftserve_device_busy_seconds_total"] < 0.1  # 5 steps that read 16 GB at 1.4 TB/s
    assert metrics["ftserve_device_idle_seconds_total"] > 0
