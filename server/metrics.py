"""Metrics: recorded by each thread into its own `Recorder`, summed when somebody asks.

A prometheus_client histogram takes a lock per observation, shared by all threads; ours have one writer. The names
follow vLLM's, so that its dashboards need one prefix changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ftserve.engine.histogram import Histogram
from ftserve.engine.loop import EngineState, EngineStats
from ftserve.engine.types import RequestTimes, Usage
from ftserve.preprocess.intake import STAGES as MEDIA_STAGES

STAGES: dict[str, tuple[str, str]] = {  # stage: the two stamps of `RequestTimes` that bound it
    "read": ("arrival", "body_read"),
    "preprocess_queue": ("body_read", "preprocess_start"),
    "validate": ("preprocess_start", "validated"),
    "template": ("validated", "templated"),
    "tokenize": ("templated", "tokenized"),
    "media": ("tokenized", "media_ready"),  # what was left to wait for once the text was ready
    "inbox": ("submitted", "admitted"),
    "queue": ("admitted", "scheduled"),
    "prefill": ("scheduled", "first_token"),
    "decode": ("first_token", "finished"),
}


def is_gil_enabled() -> bool:
    """Whether the GIL is on now; always, on builds that have one."""
    ask: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    return ask()


def _seconds() -> Histogram:
    return Histogram.exponential(0.00005, 2.0, 22)  # 50 µs to 105 s


class Recorder:
    """What one thread has seen. That thread writes; the scraper reads values that may be one request old."""

    def __init__(self) -> None:
        self.stages = {stage: _seconds() for stage in (*STAGES, *MEDIA_STAGES, "deliver")}
        self.time_to_first_token = _seconds()
        self.inter_token_latency = _seconds()
        self.e2e_latency = _seconds()
        self.output_batch = _seconds()
        self.prompt_tokens = self.generation_tokens = self.cached_tokens = 0
        self.outcomes: dict[str, int] = {}  # "200", "failed", or the status of a refusal

    def count(self, outcome: str) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def observe_stage(self, stage: str, seconds: float) -> None:
        self.stages[stage].observe(seconds)

    def observe_output(self, seconds: float, num_tokens: int) -> None:
        """Record one round of an output thread."""
        self.output_batch.observe(seconds)
        self.generation_tokens += num_tokens

    def observe_request(self, times: RequestTimes, now: float, usage: Usage, *, failed: bool) -> None:
        """Record a request that has ended; `now` is when its last byte was handed to granian."""
        self.count("failed" if failed else "200")
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        for stage, (start, end) in STAGES.items():
            began, ended = getattr(times, start), getattr(times, end)
            if began and ended:
                self.stages[stage].observe(ended - began)
        self.e2e_latency.observe(now - times.arrival)
        if times.finished:
            self.stages["deliver"].observe(now - times.finished)
        if times.first_token:
            self.time_to_first_token.observe(times.first_token - times.arrival)
            if times.finished and usage.completion_tokens > 1:
                gap = (times.finished - times.first_token) / (usage.completion_tokens - 1)
                self.inter_token_latency.observe(gap)


class ServerCollector(Collector):
    """Sums the recorders and reads the gauges when Prometheus asks."""

    def __init__(
        self,
        recorders: Callable[[], Iterable[Recorder]],
        engine: Callable[[], EngineStats],
        engine_steps: Callable[[], Histogram],
        gauges: Mapping[str, tuple[str, Callable[[], float]]],
        counters: Mapping[str, tuple[str, Callable[[], float]]],
        gc_pauses: Histogram,
        version: str,
    ) -> None:
        """Prepare; `gauges` and `counters` map a name to its help text and its reader."""
        self._recorders = recorders
        self._engine = engine
        self._engine_steps = engine_steps
        self._gauges = gauges
        self._counters = counters
        self._gc_pauses = gc_pauses
        self._version = version

    def collect(self) -> Iterator[Metric]:
        yield from self.shared()
        yield from self.front_end()

    def shared(self) -> Iterator[Metric]:
        """Yield what is the same whichever front end is asked, if there are several."""
        yield InfoMetricFamily(
            "ftserve_build", "Version of the server and of Python", {"version": self._version, "python": sys.version}
        )
        yield GaugeMetricFamily("ftserve_gil_enabled", "1 if the GIL is on", value=float(is_gil_enabled()))
        yield from self._engine_metrics()

    def front_end(self) -> Iterator[Metric]:
        """Yield what this front end has seen."""
        yield _family("ftserve_gc_pause_seconds", "Stop-the-world garbage collections", self._gc_pauses)
        parts = list(self._recorders())
        yield from self._request_metrics(parts)
        for name, (documentation, read) in self._gauges.items():
            yield GaugeMetricFamily(f"ftserve_{name}", documentation, value=read())
        for name, (documentation, read) in self._counters.items():
            yield CounterMetricFamily(f"ftserve_{name}", documentation, value=read())

    def _engine_metrics(self) -> Iterator[Metric]:
        stats = self._engine()
        for name, documentation, value in (
            ("num_requests_running", "Sequences on the device", stats.num_running),
            ("num_requests_waiting", "Sequences accepted and not scheduled", stats.num_waiting),
            ("kv_cache_usage_perc", "Used share of the KV cache, 0 to 1", stats.kv_usage),
            ("engine_step_age_seconds", "Age of the running step; grows when the engine is stuck", stats.step_age_s),
            ("engine_up", "1 if the engine can serve", float(stats.state is EngineState.READY)),
        ):
            yield GaugeMetricFamily(f"ftserve_{name}", documentation, value=value)
        for name, documentation, total in (
            ("device_busy_seconds", "Time that the device worked", stats.device_busy_s),
            ("device_idle_seconds", "Time that the device waited for work", stats.device_idle_s),
        ):
            yield CounterMetricFamily(f"ftserve_{name}", documentation, value=total)
        yield _family("ftserve_engine_step_seconds", "Duration of an engine step", self._engine_steps())

    def _request_metrics(self, parts: list[Recorder]) -> Iterator[Metric]:
        for name, documentation, field in (
            ("prompt_tokens", "Prompt tokens of finished requests", "prompt_tokens"),
            ("generation_tokens", "Generated tokens", "generation_tokens"),
            ("prefix_cache_hits", "Prompt tokens that the prefix cache saved", "cached_tokens"),
        ):
            total = sum(getattr(part, field) for part in parts)
            yield CounterMetricFamily(f"ftserve_{name}", documentation, value=total)
        requests = CounterMetricFamily("ftserve_requests", "Ended requests by outcome", labels=["outcome"])
        outcomes: dict[str, int] = {}
        for part in parts:
            for outcome, count in part.outcomes.copy().items():
                outcomes[outcome] = outcomes.get(outcome, 0) + count
        for outcome, count in sorted(outcomes.items()):
            requests.add_metric([outcome], count)
        yield requests
        for name, documentation, field in (
            ("time_to_first_token_seconds", "From the request's head to the first token", "time_to_first_token"),
            ("inter_token_latency_seconds", "Mean gap between tokens, one a request", "inter_token_latency"),
            ("e2e_request_latency_seconds", "From the request's head to the last byte", "e2e_latency"),
            ("output_batch_seconds", "One round of an output thread", "output_batch"),
        ):
            yield _family(f"ftserve_{name}", documentation, Histogram.sum(getattr(part, field) for part in parts))
        stages = HistogramMetricFamily("ftserve_stage_seconds", "Time of a request by stage", labels=["stage"])
        for stage in parts[0].stages:
            merged = Histogram.sum(part.stages[stage] for part in parts)
            stages.add_metric([stage], _buckets(merged), merged.total)
        yield stages


def _family(name: str, documentation: str, histogram: Histogram) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, documentation)
    family.add_metric([], _buckets(histogram), histogram.total)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Return Prometheus' cumulative buckets."""
    buckets, total = [], 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(total)))
    return buckets
