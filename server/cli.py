"""The command line. Defaults are read from the configuration classes; `cli_sources` has what else sets options."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from ftserve.engine.errors import EngineDeadError, FtserveError
from ftserve.server.cli_engine import add_engine_options, engine_config
from ftserve.server.cli_media import add_media_options, media_config
from ftserve.server.cli_model import add_model_options
from ftserve.server.cli_sources import add_config_option, defaults_from
from ftserve.server.config import DEFAULT_MODEL, ServerConfig, ThreadPlan, Tls, default_front_ends, default_threads

N = TypeVar("N", int, float)


def run(arguments: Sequence[str]) -> NoReturn:
    """Run the server until a signal ends it, then end the process."""
    config = parse_arguments(arguments)
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    logging.getLogger("ftserve.start").setLevel(logging.INFO)  # where it serves is said at every level
    for noisy in ("_granian", "filelock", "httpcore", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if not config.log_requests:
        logging.getLogger("ftserve.output").setLevel(logging.WARNING)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch in pool threads; the engine sets its own number
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from ftserve.server.service import Service, check_environment

    if config.front_ends:
        from ftserve.server.processes import Supervisor

        _exit(Supervisor(config).run())
    stop, abort = threading.Event(), threading.Event()

    def on_signal(_number: int, _frame: object) -> None:
        if stop.is_set():
            abort.set()
        stop.set()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    try:
        check_environment()
        service = Service(config)
        service.start(stop)
        if not stop.is_set():
            announce(service.start_lines())
        is_well = service.run(stop)
    except (FtserveError, ValueError, OSError, RuntimeError) as exc:
        cause = f" {exc.__cause__}" if isinstance(exc, EngineDeadError) else ""
        sys.stderr.write(f"ftserve: {exc}{cause}\n")
        _exit(1)
    service.drain(abort)
    service.stop()
    _exit(0 if is_well else 1)


def announce(lines: Sequence[str]) -> None:
    """Log that the server serves: the first line at every level."""
    logging.getLogger("ftserve.start").info("%s", lines[0])
    for line in lines[1:]:
        logging.getLogger("ftserve").info("%s", line)


def _exit(code: int) -> NoReturn:
    """End now: finalizing an interpreter under granian's threads aborts it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def parse_arguments(arguments: Sequence[str]) -> ServerConfig:
    """Turn arguments and environment into a configuration; exits with code 2 on a bad one."""
    parser = _parser()
    parser.set_defaults(**defaults_from(parser, arguments))
    options = parser.parse_args(arguments)
    if (options.ssl_certfile is None) != (options.ssl_keyfile is None):
        parser.error("--ssl-certfile and --ssl-keyfile go together")
    if options.max_body_mb > options.body_memory_gb * 1024:
        parser.error(f"--max-body-mb {options.max_body_mb:g} is more than --body-memory-gb {options.body_memory_gb:g}")
    front_ends = default_front_ends(options.threads) if options.front_ends is None else options.front_ends
    threads = ThreadPlan.split(
        options.threads // max(1, front_ends),
        http=options.http_threads,
        preprocess=options.preprocess_threads,
        output=options.output_threads,
    )
    return ServerConfig(
        model=options.model,
        served_model_name=options.served_model_name,
        chat_template=options.chat_template,
        trust_request_chat_template=options.trust_request_chat_template,
        generation_config=options.generation_config,
        host=options.host,
        port=options.port,
        front_ends=front_ends,
        threads=threads,
        uds=options.uds,
        tls=Tls(options.ssl_certfile, options.ssl_keyfile) if options.ssl_certfile else None,
        root_path=options.root_path,
        allowed_origins=tuple(options.allowed_origins or ()),
        api_keys=tuple(options.api_key or ()),
        http_scheduler=options.http_scheduler,
        max_concurrent_requests=options.max_concurrent_requests,
        max_body_mb=options.max_body_mb,
        max_logprobs=options.max_logprobs,
        response_store_mb=options.response_store_mb,
        response_store_hours=options.response_store_hours,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        body_memory_gb=options.body_memory_gb,
        body_timeout_s=options.body_timeout,
        request_timeout_s=options.request_timeout,
        step_timeout_s=options.step_timeout,
        on_engine_failure=options.on_engine_failure,
        shutdown_timeout_s=options.shutdown_timeout,
        stall_timeout_s=options.stall_timeout,
        log_level=options.log_level,
        log_requests=options.log_requests,
        media=media_config(options),
        engine=engine_config(options),
    )


def _number(kind: Callable[[str], N], low: N, high: N) -> Callable[[str], N]:
    """Return an argparse type: a number between the bounds, which may be reached."""

    def parse(text: str) -> N:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:  # NaN is in no range
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low} to {high}")
        return value

    return parse


_count = _number(int, 1, 2**31 - 1)
_amount = _number(float, 0.001, 1e6)  # seconds, gigabytes
_amount_or_none = _number(float, 0.0, 1e6)
_share = _number(float, 0.05, 1.0)


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a file")
    return path


def _parser() -> argparse.ArgumentParser:
    defaults = {name: field.default for name, field in ServerConfig.__dataclass_fields__.items()}
    parser = argparse.ArgumentParser(
        prog="ftserve",
        description="Serve an LLM to OpenAI clients from one process of free-threaded Python.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help="built-in name, directory, or Hugging Face hub id"
    )
    add_config_option(parser)
    add_model_options(parser, defaults)
    http = parser.add_argument_group("HTTP")
    http.add_argument("--host", default=defaults["host"], help="address to listen on")
    http.add_argument(
        "--port", type=_number(int, 0, 65535), default=defaults["port"], help="port to listen on; 0 takes a free one"
    )
    http.add_argument("--uds", type=Path, default=None, help="Unix socket to listen on, instead of host and port")
    http.add_argument("--ssl-certfile", type=_file, default=None, help="certificate chain, PEM")
    http.add_argument("--ssl-keyfile", type=_file, default=None, help="key of the certificate, PEM")
    http.add_argument("--root-path", default=defaults["root_path"], help="prefix of all paths behind a proxy")
    http.add_argument(
        "--allowed-origins",
        action="append",
        metavar="ORIGIN",
        help="origin of web pages that may call; can be given several times; * is all",
    )
    http.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="a key that clients must send; can be given several times (FTSERVE_API_KEY: separated by commas)",
    )
    http.add_argument(
        "--http-scheduler",
        choices=("direct", "asyncio"),
        default=defaults["http_scheduler"],
        help="how requests leave granian: straight, or as coroutines of an event loop",
    )
    threads = parser.add_argument_group("threads")
    threads.add_argument(
        "--threads",
        type=_count,
        default=os.environ.get("WEB_CONCURRENCY") or default_threads(),
        help="HTTP, preprocessing and output threads together",
    )
    threads.add_argument(
        "--front-ends",
        type=_number(int, 0, 256),
        default=None,
        help="processes that share these threads, beside one of the engine; 0: threads alone; if not given, "
        "0 on builds without a GIL and half of --threads on others",
    )
    for role in ("http", "preprocess", "output"):
        threads.add_argument(f"--{role}-threads", type=_count, default=None, help=f"{role} threads, if not split")
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--max-concurrent-requests",
        type=_count,
        default=defaults["max_concurrent_requests"],
        help="requests inside at once; more get 429",
    )
    limits.add_argument(
        "--max-body-mb",
        type=_amount,
        default=defaults["max_body_mb"],
        help="MiB of one request's body; more gets 413",
    )
    limits.add_argument(
        "--body-memory-gb",
        type=_amount,
        default=defaults["body_memory_gb"],
        help="GiB of all bodies that are being read or wait to be parsed; more get 429",
    )
    limits.add_argument(
        "--body-timeout",
        type=_amount,
        default=defaults["body_timeout_s"],
        help="seconds from a request's head to the end of its body; then it is ended with 408",
    )
    limits.add_argument(
        "--request-timeout",
        type=_amount,
        default=defaults["request_timeout_s"],
        help="seconds until a request is ended with 408",
    )
    limits.add_argument(
        "--stall-timeout",
        type=_amount,
        default=defaults["stall_timeout_s"],
        help="seconds until a client that takes nothing is cut off; one that takes less than half of its receive "
        "buffer in that time counts too",
    )
    limits.add_argument(
        "--max-logprobs",
        type=_number(int, 0, 1000),
        default=defaults["max_logprobs"],
        help="how many of the likeliest tokens a request may ask for at each place",
    )
    limits.add_argument(
        "--response-store-mb",
        type=_amount_or_none,
        default=defaults["response_store_mb"],
        help="memory of the responses that can be asked for again, the oldest go first; unused with several front ends",
    )
    limits.add_argument(
        "--response-store-hours",
        type=_amount,
        default=defaults["response_store_hours"],
        help="how long they are kept at most",
    )
    limits.add_argument(
        "--shutdown-timeout",
        type=_amount_or_none,
        default=defaults["shutdown_timeout_s"],
        help="seconds that SIGTERM leaves to open requests",
    )
    limits.add_argument(
        "--step-timeout",
        type=_amount,
        default=defaults["step_timeout_s"],
        help="seconds after which a step of the engine is taken for stuck",
    )
    limits.add_argument(
        "--on-engine-failure",
        choices=("report", "exit"),
        default=defaults["on_engine_failure"],
        help="what follows when the engine dies or is stuck: /health says so, and another one takes over if it is a "
        "process; or the server also ends with code 1",
    )
    add_media_options(parser, _amount, _amount_or_none)
    add_engine_options(parser, count=_count, amount=_amount, amount_or_none=_amount_or_none, share=_share)
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=defaults["log_level"],
        help="info has one line a request",
    )
    parser.add_argument(
        "--log-requests",
        action=argparse.BooleanOptionalAction,
        default=defaults["log_requests"],
        help="whether to log one line for each request that has ended",
    )
    return parser
