"""A load from several processes is the load that was asked for."""

from __future__ import annotations

from ftserve.server.bench.fleet import Load, run_load
from ftserve.server.bench.generator import Progress
from ftserve.server.bench.workload import Workload, WorkloadConfig
from tests.server.serving import MODEL, RunningServer

TEXT = WorkloadConfig(model=MODEL, mix={"text": 1.0}, prompt_words=(5, 9), max_tokens=(2, 2))


def test_a_split_load_adds_up() -> None:
    load = Load(host="h", port=1, workload=TEXT, rate=30.0, concurrency=10, max_requests=11)
    parts = load.split(4)
    assert sum(part.rate or 0.0 for part in parts) == 30.0
    assert sum(part.concurrency for part in parts) == 10
    assert [part.max_requests for part in parts] == [3, 3, 3, 2]
    assert len({part.seed for part in parts}) == 4
    assert Load(host="h", port=1, workload=TEXT, concurrency=1).split(2)[1].concurrency == 1


def test_processes_share_a_load(null_server: RunningServer) -> None:
    load = Load(host="127.0.0.1", port=null_server.port, workload=TEXT, concurrency=6, max_requests=40)
    seen: list[Progress] = []
    records = run_load(load, iter(Workload(TEXT, 0)), 2, seen.append)
    assert len(records) == 40
    assert all(record.is_good and record.tokens == 2 for record in records)
    assert [record.intended for record in records] == sorted(record.intended for record in records)
    assert seen[-1].elapsed_s > 0
