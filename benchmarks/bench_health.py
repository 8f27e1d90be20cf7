"""Whether `/health` answers while a server is busy with what others send it, and how soon bad requests are refused.

    PYTHON_GIL=0 .venv/bin/python -m benchmarks.bench_health [--seconds N]

Over the null engine, on the cores that this program shares: 200 streams at a step of 8 ms without a pause, and beside
them one client for each kind of hostile request, which sends the next `PAUSE_S` after its answer. `/health` is asked 20
times a second. Goals: its 99th percentile below 50 ms; each of the others answered within a second, by a 4xx where it
is bad. What is only dear, a regular expression of many states, may be served.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from benchmarks.load import MODEL, quantile
from benchmarks.servers import Server
from ftserve.server.bench.generator import LoadGenerator, Plan
from ftserve.server.bench.workload import Workload, WorkloadConfig

STREAMS = 200
HEALTH_HZ = 20
GOAL_HEALTH_MS = 50.0
GOAL_ANSWER_S = 1.0
PAUSE_S = 0.1
DEEP = 10_000


def chat(content: str = "Hello", **fields: Any) -> str:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 5} | fields)


def deep_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def regex(pattern: str) -> str:
    return chat(structured_outputs={"regex": pattern})


def schema(content: dict[str, Any]) -> str:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": content}})


HOSTILE: dict[str, Callable[[], str]] = {
    "a prompt of 27 MB": lambda: chat("word " * 5_400_000),
    "JSON 10,000 deep": lambda: chat()[:-1] + ',"x":' + "[" * DEEP + "]" * DEEP + "}",
    "a regex that explodes": lambda: regex("(((a{1,500}){1,500}){1,500}b?){1,500}"),
    "a schema without an end": lambda: schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "a schema 500 deep": lambda: schema(deep_schema(500)),
    "a schema of unknown types": lambda: schema({"type": "nothing"}),
}


class Loop(threading.Thread):
    """One client that sends a body over and over until told to stop."""

    def __init__(self, url: str, kind: str) -> None:
        super().__init__(daemon=True)
        self.kind = kind
        self.seconds: list[float] = []
        self.statuses: set[int] = set()
        self.stops = threading.Event()
        self._url = url

    def run(self) -> None:
        body = HOSTILE[self.kind]().encode()
        with httpx.Client(base_url=self._url, timeout=60, trust_env=False) as client:
            while not self.stops.wait(PAUSE_S):
                response = client.post(
                    "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
                )
                self.seconds.append(response.elapsed.total_seconds())
                self.statuses.add(response.status_code)


def stream(port: int, seconds: float) -> int:
    """Keep `STREAMS` streams open for so long; return how many failed."""
    config = WorkloadConfig(model=MODEL, mix={"text": 1.0}, prompt_words=(20, 60), max_tokens=(200, 200))
    plan = Plan(concurrency=STREAMS, duration_s=seconds)
    records = LoadGenerator("127.0.0.1", port, iter(Workload(config, 0)), plan).run()
    return sum(not record.is_good for record in records)


def probe(url: str, seconds: float) -> list[float]:
    """Return how many milliseconds each `/health` took, asked `HEALTH_HZ` times a second."""
    found: list[float] = []
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        client.get("/health")
        began = time.perf_counter()
        for k in itertools.count():
            due = began + k / HEALTH_HZ
            if due > began + seconds:
                return found
            time.sleep(max(0.0, due - time.perf_counter()))
            asked = time.perf_counter()
            client.get("/health").raise_for_status()
            found.append(1e3 * (time.perf_counter() - asked))
    return found


def measure(server: Server, seconds: float, kinds: list[str]) -> tuple[list[float], list[Loop], int]:
    """Return the milliseconds of `/health` while clients send `kinds` beside the streams, and what became of those."""
    url = f"http://127.0.0.1:{server.port}"
    loops = [Loop(url, kind) for kind in kinds]
    failures: list[int] = []
    streams = threading.Thread(target=lambda: failures.append(stream(server.port, seconds + 1)))
    streams.start()
    for loop in loops:
        loop.start()
    time.sleep(1.0)  # until all of it is there
    took = probe(url, seconds)
    for loop in loops:
        loop.stops.set()
    for thread in (*loops, streams):
        thread.join()
    return took, loops, failures[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each of the two rounds")
    options = parser.parse_args()
    command = ("--engine", "null", "--null-step-ms", "8", "--max-num-seqs", "256", "--no-log-requests")
    server = Server("-m", "ftserve", *command, "--port", "0")
    worst = 0.0
    missed: list[str] = []
    try:
        for name, kinds in ((f"{STREAMS} streams", []), (f"{STREAMS} streams and all of the below", list(HOSTILE))):
            took, loops, failures = measure(server, options.seconds, kinds)
            p50, p99 = quantile(took, 0.5), quantile(took, 0.99)
            print(f"/health beside {name}: p50 {p50:.1f} ms, p99 {p99:.1f}, most {max(took):.1f}; {failures} failed")
            worst = max(worst, p99)
            for loop in loops:
                statuses = ", ".join(map(str, sorted(loop.statuses)))
                median, most = quantile(loop.seconds, 0.5), max(loop.seconds, default=0.0)
                times = f"median {median:.3f} s, most {most:.3f}"
                print(f"  {loop.kind:26} {len(loop.seconds):5} times: {statuses}; {times}")
                if not all(status < 500 for status in loop.statuses) or most > GOAL_ANSWER_S:
                    missed.append(loop.kind)
    finally:
        server.stop()
    print(f"goal of {GOAL_HEALTH_MS:g} ms at p99: {'met' if worst < GOAL_HEALTH_MS else 'MISSED'}")
    print(f"goal of an answer within a second: {'MISSED by ' + ', '.join(missed) if missed else 'met'}")
    return int(worst >= GOAL_HEALTH_MS or bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
