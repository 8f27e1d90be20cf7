"""What the front end costs: CPU time per request and per streamed token over an engine that computes nothing.

    PYTHON_GIL=0 .venv/bin/python -m benchmarks.bench_frontend [--quick] [--rounds 3] [--json FILE]

The server runs as a process of its own with `--engine null`; this process is the clients. CPU time is the kernel's
accounting of the server's process, so other load on the machine disturbs it less than wall time, though not nothing.
Beside it stand floors from the same run: the libraries' bare calls, and granian with a handler that does nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load import MODEL, Outcome, Scenario, drive, prose, spread
from ftserve.server.bench.observe import cpu_by_role

WARM_UP_REQUESTS = 2000  # until the encoder's cache of words is as full as it is in service


@dataclass(frozen=True, slots=True)
class Case:
    """A scenario, the server's options for it, and the goal."""

    scenario: Scenario
    options: tuple[str, ...]
    per: str  # "request" or "token"
    goal_us: float


def cases(scale: float) -> list[Case]:
    def n(requests: int) -> int:
        return max(64, int(requests * scale))

    return [
        Case(Scenario("chat, 150 words, 1 token", n(6000), 32, 150, 1), (), "request", 300),
        Case(Scenario("chat, 2,000 words, 1 token", n(800), 16, 2000, 1), (), "request", 700),
        Case(Scenario("stream, saturated", n(400), 64, 150, 256, stream=True), (), "token", 6),
        Case(
            Scenario("stream, a step every 8 ms", n(192), 64, 150, 256, stream=True),
            ("--null-step-ms", "8"),
            "token",
            14,
        ),
    ]


@contextlib.contextmanager
def serving(*command: str) -> Iterator[tuple[int, int]]:
    """Run a server; give its process id and port."""
    with subprocess.Popen([sys.executable, "-X", "gil=0", *command], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = next(filter(None, (re.search(r"http://127\.0\.0\.1:(\d+)", line) for line in process.stderr)))
            yield process.pid, int(found.group(1))
        finally:
            process.terminate()


def measure(case: Case, seed: int) -> dict[str, Any]:
    """Run one case once against a fresh, warmed-up server."""
    command = ("-m", "ftserve", "--engine", "null", "--port", "0", "--max-num-seqs", "256", "--no-log-requests")
    with serving(*command, *case.options, MODEL) as (pid, port):
        drive(port, Scenario("warm-up", WARM_UP_REQUESTS, 32, 150, 1).bodies(seed + 1000), 32)
        bodies = case.scenario.bodies(seed)
        before = cpu_by_role(pid)
        outcome = drive(port, bodies, case.scenario.connections)
        after = cpu_by_role(pid)
    assert not outcome.failures, f"{outcome.failures} requests failed"
    units = outcome.tokens if case.per == "token" else case.scenario.requests
    roles = {role: 1e6 * (after[role] - before.get(role, 0.0)) / units for role in after}
    return {"us": sum(roles.values()), "roles": roles} | _seen_by_clients(outcome)


def _seen_by_clients(outcome: Outcome) -> dict[str, float]:
    summary = outcome.summary
    return {
        "requests_per_s": summary.requests_per_s,
        "tokens_per_s": summary.tokens_per_s,
        "tokens_per_chunk": outcome.tokens / outcome.chunks if outcome.chunks else 0.0,
        "ttft_ms_p50": summary.ttft_ms.p50,
        "ttft_ms_p99": summary.ttft_ms.p99,
        "gap_ms_p50": summary.itl_ms.p50,
        "gap_ms_p99": summary.itl_ms.p99,
    }


def floors(seed: int) -> dict[str, float]:
    """Return microseconds of CPU of the bare calls, on one thread, for a 150-word chat; and per streamed token."""
    import random

    from tokenizers.decoders import DecodeStream

    from ftserve.engine.checkpoint import Checkpoint, resolve
    from ftserve.preprocess.chat import ChatTemplate
    from ftserve.preprocess.text import make_detokenizer
    from ftserve.preprocess.tokens import load_tokenizer, make_encoder
    from ftserve.preprocess.vocabulary import build_vocabulary
    from ftserve.server.wire import ChatRequest, parse

    checkpoint = Checkpoint.read(resolve(MODEL))
    texts = list(prose(random.Random(seed), 150, 2000))
    bodies = Scenario("", 2000, 1, 150, 1).bodies(seed)
    template = ChatTemplate(checkpoint.chat_template or "", checkpoint.special_tokens)
    fast = make_encoder(checkpoint.tokenizer_json, use_fastokens=True)
    exact = make_encoder(checkpoint.tokenizer_json, use_fastokens=False)
    tokenizer = load_tokenizer(checkpoint.tokenizer_json)
    detokenizer, stream = make_detokenizer(build_vocabulary(tokenizer)), DecodeStream(skip_special_tokens=True)
    ids = [(token_id,) for text in texts[:20] for token_id in fast(text, False)]
    return {
        "parse and validate": per_call(lambda body: parse(ChatRequest, body), bodies),
        "template": per_call(lambda text: template.render([{"role": "user", "content": text}]), texts),
        "tokenize, fastokens": per_call(lambda text: fast(text, False), texts),
        "tokenize, tokenizers": per_call(lambda text: exact(text, False), texts[:300]),
        "detokenize a token, our table": per_call(detokenizer.push, ids),
        "detokenize a token, DecodeStream": per_call(lambda token: stream.step(tokenizer, token[0]), ids),
    }


def per_call(function: Callable[[Any], object], arguments: Sequence[Any]) -> float:
    """Return microseconds of this thread's CPU time per call, after a warm-up over all arguments."""
    for argument in arguments:
        function(argument)
    began = time.thread_time()
    for argument in arguments:
        function(argument)
    return 1e6 * (time.thread_time() - began) / len(arguments)


def echo_floor(scheduler: str, requests: int, seed: int) -> float:
    """Return microseconds of CPU per request of granian with a handler that reads the body and answers."""
    with serving("-m", "benchmarks.echo", scheduler) as (pid, port):
        bodies = Scenario("", requests, 32, 150, 1).bodies(seed)
        drive(port, bodies[:200], 32)
        before = sum(cpu_by_role(pid).values())
        drive(port, bodies, 32)
        return 1e6 * (sum(cpu_by_role(pid).values()) - before) / requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each case runs, in turn with the others")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    rounds, scale = (1, 0.1) if options.quick else (options.rounds, 1.0)

    runs: dict[str, list[dict[str, Any]]] = {}
    for seed in range(rounds):
        for case in cases(scale):
            runs.setdefault(case.scenario.name, []).append(measure(case, seed))
    bare = floors(0)
    for scheduler in ("direct", "asyncio"):
        bare[f"granian, empty handler, {scheduler}"] = echo_floor(scheduler, int(4000 * scale), 0)
    report(cases(scale), runs, bare)
    if options.json:
        options.json.write_text(json.dumps({"runs": runs, "floors": bare}, indent=1))


def report(all_cases: Sequence[Case], runs: dict[str, list[dict[str, Any]]], bare: dict[str, float]) -> None:
    print(f"Python {sys.version.split()[0]}, µs of CPU in the server's process: median (smallest to largest)\n")
    for case in all_cases:
        results = runs[case.scenario.name]
        median = statistics.median(result["us"] for result in results)
        verdict = "met" if median <= case.goal_us else "not met"
        figures = spread([result["us"] for result in results])
        print(f"{case.scenario.name:28} {figures} µs per {case.per}; goal {case.goal_us:g}: {verdict}")
        last = results[-1]
        print(
            "    by thread: "
            + ", ".join(f"{role} {us:.1f}" for role, us in sorted(last["roles"].items()) if us >= 0.05)
        )
        seen = (
            "requests_per_s",
            "tokens_per_s",
            "tokens_per_chunk",
            "ttft_ms_p50",
            "ttft_ms_p99",
            "gap_ms_p50",
            "gap_ms_p99",
        )
        print("    clients:   " + ", ".join(f"{name} {last[name]:.1f}" for name in seen if last[name]))
    print("\nFloors, µs of CPU:")
    for name, us in bare.items():
        print(f"    {name:36} {us:8.1f}")


if __name__ == "__main__":
    main()
