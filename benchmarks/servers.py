"""Whole servers over the null engine for the gate, and what a unit of work costs each of their processes."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Self

from benchmarks.sides import ROOT, MissingCaseError, environment, process_cpu
from ftserve.server.bench.generator import LoadGenerator, Plan
from ftserve.server.bench.workload import Item, Workload, WorkloadConfig

MODEL = "smollm2-135m-instruct"
SERVER_CASES = ("request", "stream")
_WARM_UP = 1500  # requests, until the encoder's cache of words is as full as in service
_LOADS = {  # requests a sample, clients, tokens of each answer
    "request": (500, 32, 1),
    "stream": (64, 64, 128),
    "echo": (1000, 32, 1),
}
_NULL_ENGINE = ("-m", "ftserve", "--engine", "null", "--port", "0", "--max-num-seqs", "256", "--no-log-requests")


class Server:
    """A process that serves."""

    def __init__(
        self, *command: str, checkout: Path = ROOT, site: Path | None = None, cpus: Collection[int] = ()
    ) -> None:
        """Start `python COMMAND` over a checkout, on `cpus` only if some are given."""
        self._command, self._checkout, self._site, self._cpus = command, checkout, site, cpus
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *self._command],
            cwd=self._checkout,
            env=environment(self._site),
            stderr=subprocess.PIPE,
            text=True,
        )
        if self._cpus:  # before it has threads, which inherit it
            os.sched_setaffinity(self.process.pid, self._cpus)
        assert self.process.stderr is not None
        found = (re.search(r"at http://127\.0\.0\.1:(\d+)", line) for line in self.process.stderr)
        address = next(filter(None, found), None)
        self.port = int(address.group(1)) if address else 0

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


class Servers:
    """This checkout's server, the base's if there is one, and granian with an empty handler."""

    def __init__(self, checkouts: Mapping[str, Path], sites: Mapping[str, Path]) -> None:
        self.running = {name: Server(*_NULL_ENGINE, checkout=checkouts[name], site=sites[name]) for name in checkouts}
        command = ("-m", "benchmarks.echo", "direct")
        self.running["echo"] = Server(*command, checkout=checkouts["head"], site=sites["head"])
        self._items = {name: _items(name) for name in _LOADS}
        self._warm_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.running.values():
            server.stop()

    def restart(self) -> None:
        for server in self.running.values():
            server.stop()
            server.start()
        self._warm_up()

    def _warm_up(self) -> None:
        for name in self.running:
            self._drive(name, "request", _WARM_UP)

    def cost(self, name: str, load: str) -> Callable[[], float]:
        """Return a function that takes one sample of a server: nanoseconds of CPU a request or token."""
        requests, _, tokens = _LOADS[load]
        units = requests * tokens

        def measure() -> float:
            with process_cpu(self.running[name].process.pid) as spent:
                self._drive(name, load, requests)
            return spent[0] / units

        return measure

    def _drive(self, name: str, load: str, requests: int) -> None:
        server = self.running[name]
        if not server.port:
            raise MissingCaseError(f"the server '{name}' does not start")
        plan = Plan(concurrency=_LOADS[load][1], max_requests=requests)
        records = LoadGenerator("127.0.0.1", server.port, self._items[load], plan).run()
        if failures := [record.failure for record in records if not record.is_good]:
            raise MissingCaseError(f"the server '{name}' failed {len(failures)} requests: {failures[0]}")


def _items(load: str) -> Iterator[Item]:
    """Yield the requests of a load over and over; made before, so that making them is not in between."""
    _, _, tokens = _LOADS[load]
    config = WorkloadConfig(model=MODEL, mix={"text": 1.0}, max_tokens=(tokens, tokens), stream=load == "stream")
    return itertools.cycle(list(itertools.islice(Workload(config, 0), 2000)))
