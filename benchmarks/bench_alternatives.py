"""The same model, requests and threads through this server and through `transformers serve`, one after the other.

    PYTHON_GIL=0 .venv/bin/python -m benchmarks.bench_alternatives [--serve-packages DIR] [--requests 24]

`make bench` fetches what `transformers serve` needs into DIR; without it that part is left out. Each computes
SmolLM2-135M in bfloat16 with one thread of torch. Answers are greedy and end where the model ends them, as
`transformers serve` refuses `ignore_eos`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cases import checkpoint
from benchmarks.servers import MODEL, Server
from ftserve.server.bench.cli import Target
from ftserve.server.bench.generator import LoadGenerator, Plan
from ftserve.server.bench.observe import ServerUse
from ftserve.server.bench.results import Slo, Summary, summarize
from ftserve.server.bench.workload import Workload, WorkloadConfig

_START_TIMEOUT_S = 120.0
_PORT = 18475  # `transformers serve` cannot be told to take a free one


@dataclass(frozen=True, slots=True)
class Result:
    """One server under the load."""

    name: str
    summary: Summary
    use: ServerUse


def measure(name: str, target: Target, model: str, requests: int, clients: int, tokens: int) -> Result:
    config = WorkloadConfig(model=model, mix={"text": 1.0}, max_tokens=(tokens, tokens), ignore_eos=False)
    items = iter(Workload(config, 0))
    LoadGenerator(target.host, target.port, items, Plan(concurrency=2, max_requests=2)).run()
    before = target.glance()
    plan = Plan(concurrency=clients, max_requests=requests)
    records = LoadGenerator(target.host, target.port, items, plan).run()
    return Result(name, summarize(records, Slo()), ServerUse.between(before, target.glance()))


@contextmanager
def ours() -> Iterator[Target]:
    server = Server("-m", "ftserve", "--port", "0", "--torch-threads", "1", "--no-log-requests", MODEL)
    try:
        yield Target(f"http://127.0.0.1:{server.port}", None, server.process.pid)
    finally:
        server.stop()


@contextmanager
def transformers_serve(packages: Path, *options: str) -> Iterator[Target]:
    """Run transformers' own server.

    Raises:
        RuntimeError: it does not start.
    """
    command = [
        str(Path(sys.executable).parent / "transformers"),
        "serve",
        str(checkpoint().path),
        "--host",
        "127.0.0.1",
    ]
    command += ["--port", str(_PORT), "--device", "cpu", "--dtype", "bfloat16", "--log-level", "error", *options]
    environment = os.environ | {"PYTHONPATH": str(packages), "PYTHON_GIL": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            target, deadline = (
                Target(f"http://127.0.0.1:{_PORT}", None, process.pid),
                time.monotonic() + _START_TIMEOUT_S,
            )
            while not _answers(target):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("transformers serve does not start")
                time.sleep(0.5)
            yield target
        finally:
            process.kill()


def _answers(target: Target) -> bool:
    import http.client

    connection = http.client.HTTPConnection(target.host, target.port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def row(result: Result) -> str:
    summary, use = result.summary, result.use
    per_token = 1e3 * use.cpu_s / max(1, summary.tokens)
    return (
        f"{result.name:40} {summary.tokens_per_s:7.1f} tok/s  {per_token:6.2f} ms of CPU a token  "
        f"TTFT p50 {summary.ttft_ms.p50:7.0f} ms  ITL p50 {summary.itl_ms.p50:6.1f} ms p99 {summary.itl_ms.p99:6.0f}  "
        f"{use.rss_mb:6.0f} MB  {summary.answered} of {summary.requests} answered"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve-packages", type=Path, help="folder with fastapi and uvicorn")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    load = (options.requests, options.clients, options.tokens)
    print(f"{MODEL}, bfloat16, one torch thread; {load[1]} clients, 150-word prompts, {load[2]} tokens")
    with ours() as target:
        print(row(measure("ftserve", target, MODEL, *load)), flush=True)
    if options.serve_packages is None:
        print("transformers serve: left out, no --serve-packages")
        return
    for name, mode in (
        ("transformers serve, continuous batching", "--continuous-batching"),
        ("transformers serve", ""),
    ):
        with transformers_serve(options.serve_packages, *filter(None, [mode])) as target:
            requests = load[0] if mode else max(4, load[0] // 6)  # one at a time: more would only take longer
            print(row(measure(name, target, str(checkpoint().path), requests, *load[1:])), flush=True)


if __name__ == "__main__":
    main()
