"""The command line of `ftserve bench`."""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ftserve.server.bench.arrivals import ARRIVALS
from ftserve.server.bench.fleet import Load, run_load
from ftserve.server.bench.generator import LoadGenerator, Progress
from ftserve.server.bench.observe import Glance, ServerUse, listener
from ftserve.server.bench.report import Run, as_html, as_json, as_text
from ftserve.server.bench.results import Slo, summarize
from ftserve.server.bench.workload import KINDS, Item, Workload, WorkloadConfig

DEFAULT_DURATION_S = 30.0


class Target:
    """The server under load."""

    def __init__(self, url: str, api_key: str | None, pid: int | None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"{url}: the load goes over plain http://HOST:PORT")
        self.host, self.port = parts.hostname, parts.port or 80
        self.headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.pid = pid if pid is not None else listener(self.host, self.port)

    def model(self) -> str:
        """Return the first model that the server offers.

        Raises:
            ValueError: it offers none, or does not answer.
        """
        connection = http.client.HTTPConnection(self.host, self.port, timeout=10)
        try:
            connection.request("GET", "/v1/models", headers=self.headers)
            return str(json.loads(connection.getresponse().read())["data"][0]["id"])
        except (OSError, http.client.HTTPException, ValueError, LookupError) as exc:
            raise ValueError(f"http://{self.host}:{self.port}/v1/models does not name a model: {exc}") from exc
        finally:
            connection.close()

    def glance(self) -> Glance:
        return Glance.take(self.host, self.port, self.pid, self.headers)


def main(arguments: Sequence[str]) -> int:
    """Run the load and say what came of it; 0 if every request was answered or cancelled by us."""
    options = _parser().parse_args(arguments)
    try:
        target = Target(options.url, options.api_key, options.pid)
        config = _workload_config(options, options.model or target.model())
        items, load = iter(Workload(config, options.seed)), _load(options, target, config)
        if options.warm_up:
            _warm_up(load, items, options.warm_up)
        rates = enumerate(options.rate or [None])
        runs = [_run(options, target, replace(load, rate=rate, seed=load.seed + k), items) for k, rate in rates]
    except (ValueError, OSError, RuntimeError) as exc:
        sys.stderr.write(f"ftserve bench: {exc}\n")
        return 2
    settings = {name: value for name, value in vars(options).items() if value is not None and name != "api_key"}
    settings["model"] = config.model
    if options.json is not None:
        options.json.write_text(as_json(settings, runs))
    if options.html is not None:
        options.html.write_text(as_html(f"ftserve bench: {config.model}", settings, runs))
    return 1 if any(run.summary.failures for run in runs) else 0


def _run(options: argparse.Namespace, target: Target, load: Load, items: Iterator[Item]) -> Run:
    before = target.glance()
    records = run_load(load, items, options.processes, None if options.quiet else _show())
    server = ServerUse.between(before, target.glance())
    if not records:
        raise ValueError("no request was due in that time")
    name = f"{load.concurrency} clients" if load.rate is None else f"{load.rate:g} requests/s"
    run = Run(name, load.rate, records, summarize(records, options.slo), server)
    sys.stdout.write(as_text(run) + "\n")
    sys.stdout.flush()
    return run


def _warm_up(load: Load, items: Iterator[Item], requests: int) -> None:
    plan = replace(load, rate=None, max_requests=requests, duration_s=None).plan()
    LoadGenerator(load.host, load.port, items, plan).run()


def _load(options: argparse.Namespace, target: Target, config: WorkloadConfig) -> Load:
    duration = options.duration
    if duration is None and options.requests is None:
        duration = DEFAULT_DURATION_S
    return Load(
        host=target.host,
        port=target.port,
        workload=config,
        seed=options.seed,
        arrivals=options.arrivals,
        burst_size=options.burst_size,
        concurrency=options.concurrency,
        max_requests=options.requests,
        duration_s=duration,
        max_connections=options.max_connections,
        timeout_s=options.timeout,
        headers=tuple(target.headers.items()),
    )


def _show() -> Callable[[Progress], None]:
    """Return what keeps one line of a terminal up to date, or adds a line now and then to a file."""
    is_terminal, ticks = sys.stderr.isatty(), itertools.count(1)
    last = [0.0, 0, 0]

    def show(now: Progress) -> None:
        if next(ticks) % (4 if is_terminal else 40):
            return
        seconds = max(1e-3, now.elapsed_s - last[0])
        rate, tokens = (now.done - last[1]) / seconds, (now.tokens - last[2]) / seconds
        last[:] = now.elapsed_s, now.done, now.tokens
        line = (
            f"{now.elapsed_s:6.1f} s  sent {now.sent}  open {now.open}  done {now.done}  failed {now.failed}  "
            f"{rate:.0f} req/s  {tokens:.0f} tok/s"
        )
        sys.stderr.write(f"\r{line}\x1b[K" if is_terminal else f"{line}\n")
        sys.stderr.flush()

    return show


def _workload_config(options: argparse.Namespace, model: str) -> WorkloadConfig:
    return WorkloadConfig(
        model=model,
        mix=options.mix,
        prompt_words=options.prompt_words,
        max_tokens=options.max_tokens,
        stream=options.stream,
        images_per_request=options.images_per_request,
        image_size=options.image_size,
        clip_size=options.clip_size,
        clip_s=options.clip_seconds,
        repeat_share=options.repeat_share,
        cancel_share=options.cancel_share,
        cancel_within_s=options.cancel_within,
        ignore_eos=options.ignore_eos,
        file=options.file,
    )


def _range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    bounds = (int(low), int(high or low))
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is not N or MIN-MAX")
    return bounds


def _size(text: str) -> tuple[int, int]:
    width, _, height = text.partition("x")
    return int(width), int(height)


def _mix(text: str) -> dict[str, float]:
    mix = {}
    for part in text.split(","):
        kind, _, weight = part.partition("=")
        if kind not in KINDS:
            raise argparse.ArgumentTypeError(f"{kind!r} is not one of {', '.join(KINDS)}")
        mix[kind] = float(weight or 1)
    return mix


def _rates(text: str) -> list[float]:
    rates = [float(part) for part in text.split(",")]
    if min(rates) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive rates")
    return rates


def _slo(text: str) -> Slo:
    limits: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in ("ttft", "itl", "e2e"):
            raise argparse.ArgumentTypeError(f"{name!r} is not one of ttft, itl, e2e")
        limits[name] = float(value)
    return Slo(**limits)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ftserve bench",
        description="Load an OpenAI-compatible server over HTTP and report latencies, rates and what the server spent.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="the server")
    parser.add_argument("--model", help="model name; if not given, the first that the server offers")
    parser.add_argument("--api-key")
    parser.add_argument("--seed", type=int, default=0)
    load = parser.add_argument_group("load")
    load.add_argument("--concurrency", type=int, default=32, help="clients of a closed loop")
    load.add_argument(
        "--rate", type=_rates, metavar="R[,R...]", help="open loop: requests a second; several make several runs"
    )
    load.add_argument("--arrivals", choices=ARRIVALS, default="poisson", help="of an open loop")
    load.add_argument("--burst-size", type=int, default=10, help="requests at one moment, with --arrivals bursts")
    load.add_argument("--requests", type=int, help="end after so many")
    load.add_argument("--duration", type=float, help=f"seconds; if nothing is given, {DEFAULT_DURATION_S:g}")
    load.add_argument("--warm-up", type=int, default=0, help="requests before the first run that do not count")
    load.add_argument("--timeout", type=float, default=600.0, help="seconds until a request is given up")
    load.add_argument("--processes", type=int, default=1, help="of the generator, each with its part of the load")
    load.add_argument("--max-connections", type=int, default=4096, help="more requests at once wait for one")
    content = parser.add_argument_group("requests")
    content.add_argument(
        "--mix", type=_mix, default="text", help="kinds of requests by weight, such as text=8,images=2,video=1"
    )
    content.add_argument("--file", type=Path, help="JSON lines with messages or prompt, or a ShareGPT list")
    content.add_argument("--prompt-words", type=_range, default="150", metavar="N[-M]", help="of real prose")
    content.add_argument("--max-tokens", type=_range, default="128", metavar="N[-M]")
    content.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True)
    content.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)
    content.add_argument("--images-per-request", type=int, default=1)
    content.add_argument("--image-size", type=_size, default="1280x960")
    content.add_argument("--clip-size", type=_size, default="1280x720")
    content.add_argument("--clip-seconds", type=float, default=10.0)
    content.add_argument("--repeat-share", type=float, default=0.0, help="0 to 1, of media that were sent before")
    content.add_argument("--cancel-share", type=float, default=0.0, help="0 to 1, of clients that go away")
    content.add_argument("--cancel-within", type=float, default=2.0, help="seconds in which they do")
    output = parser.add_argument_group("report")
    output.add_argument("--slo", type=_slo, default=Slo(), metavar="ttft=MS,itl=MS,e2e=MS", help="for the goodput")
    output.add_argument("--json", type=Path, help="write all figures there")
    output.add_argument("--html", type=Path, help="write a page with plots there")
    output.add_argument("--pid", type=int, help="the server's process, if it is not found by its port")
    output.add_argument("--quiet", action="store_true", help="no progress line")
    return parser
