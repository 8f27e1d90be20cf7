"""Configuration of the server: one frozen dataclass, made by the command line, and the rule that splits threads."""

from __future__ import annotations

import os
import sysconfig
from dataclasses import dataclass, field, replace
from pathlib import Path

from ftserve.engine.config import EngineConfig

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class ThreadPlan:
    """How many threads each role has."""

    http: int
    preprocess: int
    output: int

    @classmethod
    def split(
        cls, total: int, *, http: int | None = None, preprocess: int | None = None, output: int | None = None
    ) -> ThreadPlan:
        """Split `total` threads; a part that is given keeps its value.

        HTTP gets one thread, two from 16 on: its work is in Rust and small. Output gets an eighth, since a thread
        writes 10,000 streamed tokens in a tenth of a second. Preprocessing, where images are decoded, gets the
        rest. No role gets less than one.
        """
        http = http or (2 if total >= 16 else 1)
        output = output or max(1, total // 8)
        return cls(http, preprocess or max(1, total - http - output), output)


def usable_cpus() -> int:
    """Return how many CPUs this process may use: its affinity, bounded by the cgroup's quota, rounded up."""
    allowed = len(os.sched_getaffinity(0))
    quota = _cgroup_quota()
    return allowed if quota is None else max(1, min(allowed, -int(-quota // 1)))


def _cgroup_quota() -> float | None:
    """Return the CPUs of the tightest cgroup v2 quota between ours and the root, or None."""
    try:
        path = next(
            line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"
        )
    except (OSError, StopIteration):
        return None
    root = Path("/sys/fs/cgroup")
    group = root / path.lstrip("/")
    quotas = []
    for folder in (group, *group.parents):
        try:
            limit, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            limit = "max"
        if limit != "max":
            quotas.append(int(limit) / int(period))
        if folder == root:
            break
    return min(quotas, default=None)


@dataclass(frozen=True, slots=True)
class Tls:
    """Where the certificate chain and its key are, in PEM."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """What clients may send beside text, and what it may cost."""

    cache_gb: float = 4.0  # of decoded images, videos and sound
    max_images: int = 64  # in one prompt
    max_videos: int = 8
    max_audios: int = 16
    max_file_mb: float = 64.0  # MiB of one file, compressed
    max_megapixels: float = 67.2  # of one image: 8192 x 8192
    max_video_frames: int = 65536  # in one file; how many of them are looked at is the model's
    max_video_seconds: float = 3600.0
    max_audio_seconds: float = 3600.0  # or what the model can hear, if that is less
    decoding_megapixels: float = 512.0  # of all that is being decoded at once
    waiting_megapixels: float = 8192.0  # of what waits for that; more gets 429
    allowed_local_path: Path | None = None  # for file: URLs
    allowed_domains: tuple[str, ...] = ()  # for http: and https: URLs; none: every public host
    fetch_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything the command line decides."""

    model: str = DEFAULT_MODEL
    served_model_name: str | None = None  # None: `model` as it was given
    chat_template: Path | None = None  # instead of the model's own
    trust_request_chat_template: bool = False  # whether requests may bring one along
    generation_config: str = "auto"  # where sampling defaults come from: auto | none | a path
    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    uds: Path | None = None  # a Unix socket instead of host and port
    tls: Tls | None = None
    root_path: str = ""  # what a proxy puts before our paths and does not take away
    allowed_origins: tuple[str, ...] = ()  # of web pages that may call; "*": all
    front_ends: int = 0  # processes beside one of the engine; 0: all is threads of one process
    threads: ThreadPlan = field(default_factory=lambda: ThreadPlan.split(default_threads()))  # of one front end
    api_keys: tuple[str, ...] = ()  # any of them opens the server; none: it is open
    http_scheduler: str = "direct"  # direct | asyncio
    max_concurrent_requests: int = 1024  # HTTP requests between their head and the end of their answer
    max_body_mb: float = 64.0  # MiB of one request
    body_memory_gb: float = 2.0  # GiB of all bodies that are being read or wait to be parsed
    body_timeout_s: float = 60.0  # from a request's head to the end of its body
    tool_call_parser: str = "auto"  # a name of `parsers/registry.py`; auto: by the chat template
    reasoning_parser: str = "auto"  # the same; none: thoughts are content
    response_store_mb: float = 256.0  # of responses that can be asked for again
    response_store_hours: float = 24.0  # how long they are kept at most
    max_logprobs: int = 20  # of the likeliest tokens that a request may ask for at each place
    max_response_bytes: int = 256 << 20  # one answer; bounds what a slow reader can pile up
    request_timeout_s: float = 600.0
    shutdown_timeout_s: float = 10.0
    step_timeout_s: float = 300.0  # a step of the engine that takes longer is taken for stuck
    # report: in /health, and start another engine if it is a process; exit: with code 1, for a supervisor of ours
    on_engine_failure: str = "report"
    stall_timeout_s: float = 30.0  # a client that takes no byte for so long is cut off
    log_level: str = "info"
    log_requests: bool = True  # one line a finished request, at level info
    media: MediaConfig = field(default_factory=MediaConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)

    def of_front_end(self) -> ServerConfig:
        """Return the configuration of each front end: what all hold together is divided evenly."""
        count = self.front_ends
        return replace(
            self,
            on_engine_failure="report",  # what else is to be done is the supervisor's
            max_concurrent_requests=-(-self.max_concurrent_requests // count),
            body_memory_gb=self.body_memory_gb / count,
            media=replace(
                self.media,
                cache_gb=self.media.cache_gb / count,
                decoding_megapixels=self.media.decoding_megapixels / count,
                waiting_megapixels=self.media.waiting_megapixels / count,
            ),
        )


def default_front_ends(threads: int) -> int:
    """Return the default of `--front-ends`: half of `--threads` on builds with a GIL, and 0, threads alone, on others.

    Half, since one that holds the GIL all the time, and granian's threads beside it, fill more than a CPU and less than
    two; images are decoded without the GIL.
    """
    return 0 if sysconfig.get_config_var("Py_GIL_DISABLED") else max(1, threads // 2)


def default_threads() -> int:
    """Return the default of `--threads`: the CPUs we may use, and three at least."""
    return max(3, usable_cpus())
