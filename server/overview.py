"""What /metrics and /load say: of this process, or of all front ends together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from ftserve.server.metrics import ServerCollector

Load = dict[str, int]
Report = Mapping[str, Any]  # what one front end knows: its name as `process`, its `metrics` as text, its `load`


class Overview(Protocol):
    """Answers questions about the server as a whole; on the thread that asks, or a bit later on another one."""

    def metrics(self, then: Callable[[str], None]) -> None:
        """Call `then` with the text of /metrics."""

    def load(self, then: Callable[[Load], None]) -> None:
        """Call `then` with the content of /load."""


class Reports(Protocol):
    """Asks the other front ends."""

    def gather(self, then: Callable[[Sequence[Report]], None]) -> None:
        """Call `then` with the reports of all front ends that answer, on a thread of its own."""


class LocalOverview:
    """The overview of a server that is one process."""

    def __init__(self, collector: ServerCollector, load: Callable[[], Load], engine_load: Callable[[], Load]) -> None:
        """Prepare; `load` counts what is in the front end, `engine_load` what is in the engine."""
        self._collector = collector
        self._load = load
        self._engine_load = engine_load

    def metrics(self, then: Callable[[str], None]) -> None:
        then(text_of(self._collector.collect()))

    def load(self, then: Callable[[Load], None]) -> None:
        then({**self._load(), **self._engine_load()})

    def report(self) -> Report:
        """Return what other front ends need of this one."""
        return {"metrics": text_of(self._collector.front_end()), "load": self._load()}

    def merged_metrics(self, reports: Sequence[Report]) -> str:
        """Return the text of /metrics with what all front ends report."""
        return text_of([*self._collector.shared(), *merge({r["process"]: r["metrics"] for r in reports})])

    def merged_load(self, reports: Sequence[Report]) -> Load:
        """Return the content of /load with what all front ends report."""
        return {**_sum(report["load"] for report in reports), **self._engine_load()}


class MergedOverview:
    """The overview of a server with several front ends, one of which is asked."""

    def __init__(self, local: LocalOverview, reports: Reports) -> None:
        self._local = local
        self._reports = reports

    def metrics(self, then: Callable[[str], None]) -> None:
        self._reports.gather(lambda reports: then(self._local.merged_metrics(reports)))

    def load(self, then: Callable[[Load], None]) -> None:
        self._reports.gather(lambda reports: then(self._local.merged_load(reports)))


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def text_of(families: Iterable[Metric]) -> str:
    """Return metrics as Prometheus reads them."""
    return generate_latest(_Families(families)).decode()


def merge(texts: Mapping[str, str]) -> Iterator[Metric]:
    """Return the metrics of several processes, by name, as one: gauges labelled with the process, all else summed."""
    families: dict[str, Metric] = {}
    sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for process, text in texts.items():
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                if family.type == "gauge":
                    merged.add_sample(sample.name, {**sample.labels, "process": process}, sample.value)
                    continue
                key = sample.name, tuple(sample.labels.items())
                of_family = sums.setdefault(family.name, {})
                of_family[key] = of_family.get(key, 0.0) + sample.value
    for name, family in families.items():
        for (sample_name, labels), value in sums.get(name, {}).items():
            family.add_sample(sample_name, dict(labels), value)
        yield family


def _sum(loads: Iterable[Load]) -> Load:
    total: Load = {}
    for load in loads:
        for name, value in load.items():
            total[name] = total.get(name, 0) + value
    return total
