"""What images and videos cost: CPU by stage, beside transformers' processor, on one and two threads, and served.

    PYTHON_GIL=0 .venv/bin/python -m benchmarks.bench_media [--quick] [--rounds 3]

Stages are the calling thread's CPU time; servers are charged by the kernel's accounting of their threads, over the null
engine, with the generator in this process. All that is compared is from one run, in turns. The model is `tiny-vlm`,
whose processor is Qwen2.5-VL's with transformers' default of one million pixels an image. The files are photographs in
size and statistics, made by `ftserve.server.bench.media`; all differ, unless it says repeated.
"""

from __future__ import annotations

import argparse
import io
import itertools
import math
import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.load import quantile
from benchmarks.servers import Server
from ftserve.engine.types import Modality
from ftserve.preprocess.formats import ImageLimits, open_image, prepare_thread
from ftserve.preprocess.images import PatchRules, PatchWriter, decode, patchify, resize
from ftserve.preprocess.media import media_key
from ftserve.preprocess.pixels import as_array
from ftserve.preprocess.qwen import QwenMedia
from ftserve.preprocess.sources import MediaSource, read_data_url
from ftserve.preprocess.video import VideoFile, VideoLimits
from ftserve.preprocess.video_rules import VideoRules
from ftserve.server.bench.generator import LoadGenerator, Plan
from ftserve.server.bench.media import clip_maker, jpeg_maker
from ftserve.server.bench.observe import cpu_by_role
from ftserve.server.bench.results import Record
from ftserve.server.bench.workload import Item, Workload, WorkloadConfig

MODEL = "tiny-vlm"
RULES = PatchRules()
VIDEO_RULES = VideoRules(patches=PatchRules(min_pixels=128 * 28 * 28, max_pixels=768 * 28 * 28))
MOST_BYTES = 64 << 20
TEXT_RATE = 25  # text requests per second while media are served

Timer = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of input."""

    name: str
    modality: Modality
    url: Callable[[int], str]


def kinds() -> list[Kind]:
    return [
        Kind("JPEG 1280x960", Modality.IMAGE, jpeg_maker(1280, 960, 0)),
        Kind("JPEG 2304x1728", Modality.IMAGE, jpeg_maker(2304, 1728, 1)),
        Kind("PNG 1280x960", Modality.IMAGE, _png_maker(1280, 960)),
        Kind("H.264 1280x720, 10 s", Modality.VIDEO, clip_maker(1280, 720, 10.0, 2)),
    ]


def _png_maker(width: int, height: int) -> Callable[[int], str]:
    import base64

    from PIL import Image

    photograph = Image.open(io.BytesIO(read_data_url(jpeg_maker(width, height, 3)(0), MOST_BYTES)[0]))
    file = io.BytesIO()
    photograph.save(file, "PNG", compress_level=6)
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return lambda _number: url


def image_stages(url: str, lap: Timer) -> None:
    data = read_data_url(url, MOST_BYTES)
    lap("base64")
    media_key(data, b"", b"")
    lap("digest")
    image = open_image(data[0], ImageLimits())
    size = RULES.fit(image.height, image.width)
    lap("header")
    flat = decode(image)
    lap("decode")
    planes = resize(as_array(flat), size)
    lap("resize")
    patchify([planes], RULES)
    lap("patchify")


def video_stages(url: str, lap: Timer) -> None:
    data = read_data_url(url, MOST_BYTES)
    lap("base64")
    media_key(data, b"", b"")
    lap("digest")
    video = VideoFile(data[0], VideoLimits())
    lap("header")
    indices = VIDEO_RULES.choose(len(video.times_s), video.rate)
    size = VIDEO_RULES.fit(len(indices), video.height, video.width)
    writer = PatchWriter(len(indices), size, VIDEO_RULES.patches)
    for pixels in video.frames(indices):
        lap("decode")
        planes = resize(pixels, size)
        lap("resize")
        writer.put(planes)
        lap("patchify")
    writer.finish()


def stages(kind: Kind, count: int) -> dict[str, float]:
    """Return milliseconds of CPU by stage, the median over `count` files."""
    run = image_stages if kind.modality is Modality.IMAGE else video_stages
    seen: dict[str, list[float]] = {}
    for number in range(count + 2):
        url, spent, last = kind.url(number), dict[str, float](), time.thread_time()

        def lap(stage: str, spent: dict[str, float] = spent) -> None:
            nonlocal last
            now = time.thread_time()
            spent[stage] = spent.get(stage, 0.0) + 1e3 * (now - last)
            last = now

        last = time.thread_time()
        run(url, lap)
        if number >= 2:
            for stage, ms in spent.items():
                seen.setdefault(stage, []).append(ms)
    return {stage: statistics.median(times) for stage, times in seen.items()}


def reference(kind: Kind, count: int) -> float:
    """Return milliseconds of CPU of transformers' way, on one thread: Pillow or PyAV, then the model's processor."""
    from PIL import Image
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    images: Any = Qwen2VLImageProcessor()
    videos: Any = Qwen2VLVideoProcessor(cap_pixels_per_frame=False)

    def image(url: str) -> None:
        picture = Image.open(io.BytesIO(read_data_url(url, MOST_BYTES)[0])).convert("RGB")
        images(images=picture, return_tensors="pt")

    def video(url: str) -> None:
        import av

        with av.open(io.BytesIO(read_data_url(url, MOST_BYTES)[0]), "r") as container:
            rate, total = float(container.streams.video[0].average_rate or 24), container.streams.video[0].frames
            chosen = set(VIDEO_RULES.choose(total, rate))
            frames = [
                frame.to_ndarray(format="rgb24") for k, frame in enumerate(container.decode(video=0)) if k in chosen
            ]
        clip = np.stack(frames).transpose(0, 3, 1, 2)
        videos(videos=[clip], do_sample_frames=False, return_tensors="pt")

    run = image if kind.modality is Modality.IMAGE else video
    spent = []
    for number in range(count + 1):
        url, began = kind.url(number), time.process_time()
        run(url)
        spent.append(1e3 * (time.process_time() - began))
    return statistics.median(spent[1:])


def in_threads(kind: Kind, num_threads: int, count: int) -> tuple[float, float]:
    """Return items a second, by the clock, and milliseconds of CPU an item, each thread with files of its own."""
    handler = QwenMedia(RULES, VIDEO_RULES, {}, ImageLimits(), VideoLimits())
    source = MediaSource(modality=kind.modality, param="")
    urls = [[kind.url(1000 * k + n) for n in range(count)] for k in range(num_threads)]
    barrier = threading.Barrier(num_threads + 1)

    def work(mine: Sequence[str]) -> None:
        prepare_thread()
        barrier.wait()
        for url in mine:
            payload = read_data_url(url, MOST_BYTES)
            key = media_key(payload, handler.options(source), b"")
            handler.open(payload, source).decode(key, lambda: True)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in urls]
    for thread in threads:
        thread.start()
    barrier.wait()
    began, cpu = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.join()
    items = num_threads * count
    return items / (time.perf_counter() - began), 1e3 * (time.process_time() - cpu) / items


def requests(kind: str, count: int, *, repeat_share: float = 0.0, seed: int = 0) -> list[Item]:
    """Return chat requests made before the load begins."""
    config = WorkloadConfig(
        model=MODEL,
        mix={kind: 1.0},
        prompt_words=(20, 20) if kind != "text" else (150, 150),
        max_tokens=(1, 1),
        stream=False,
        repeat_share=repeat_share,
    )
    return list(itertools.islice(Workload(config, seed), count))


def drive(port: int, items: Sequence[Item], clients: int) -> list[Record]:
    plan = Plan(concurrency=clients, max_requests=len(items))
    records = LoadGenerator("127.0.0.1", port, iter(items), plan).run()
    assert all(record.is_good for record in records), next(r.failure for r in records if not r.is_good)
    return records


def served(server: Server, items: Sequence[Item]) -> tuple[dict[str, float], float]:
    """Return milliseconds of CPU a request by role of thread, and requests a second."""
    before, began = cpu_by_role(server.process.pid), time.perf_counter()
    drive(server.port, items, 8)
    wall = time.perf_counter() - began
    after = cpu_by_role(server.process.pid)
    spent = {role: 1e3 * (after[role] - before.get(role, 0.0)) / len(items) for role in after}
    return {role: ms for role, ms in spent.items() if ms >= 0.01}, len(items) / wall


def text_latencies(port: int, seconds: float) -> list[float]:
    """Return milliseconds of each of an even stream of text requests."""
    arrivals: Iterator[float] = (k / TEXT_RATE for k in itertools.count())
    plan = Plan(arrivals=arrivals, duration_s=seconds)
    records = LoadGenerator("127.0.0.1", port, itertools.cycle(requests("text", 500)), plan).run()
    return [1e3 * record.e2e for record in records if record.is_good]


def _media_load(port: int, seconds: float, count: int) -> None:
    """Keep the server busy with distinct images, from another process."""
    items = itertools.cycle(requests("images", count, seed=7))
    LoadGenerator("127.0.0.1", port, items, Plan(concurrency=8, duration_s=seconds)).run()


def fairness(server: Server, seconds: float, count: int) -> tuple[list[float], list[float]]:
    """Return text latencies without media and with as many as can be served."""
    quiet = text_latencies(server.port, seconds)
    load = multiprocessing.get_context("spawn").Process(target=_media_load, args=(server.port, 2 * seconds + 10, count))
    load.start()
    time.sleep(5.0)  # it makes its requests first
    busy = text_latencies(server.port, seconds)
    load.terminate()
    load.join()
    return quiet, busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of the served cases")
    parser.add_argument("--quick", action="store_true", help="one short round")
    options = parser.parse_args()
    scale, rounds = (0.2, 1) if options.quick else (1.0, options.rounds)
    prepare_thread()
    everything = kinds()
    print("CPU ms an item, one thread; beside it transformers' processor in the same run\n")
    for kind in everything:
        count = max(3, int((30 if kind.modality is Modality.IMAGE else 5) * scale))
        spent = stages(kind, count)
        theirs = reference(kind, count)
        parts = ", ".join(f"{stage} {ms:.2f}" for stage, ms in spent.items())
        total = sum(spent.values())
        print(f"{kind.name:24} {total:7.1f}   transformers {theirs:7.1f}   {theirs / total:.1f}x   ({parts})")
    print("\nThreads, JPEG 1280x960: items a second, CPU ms an item")
    points = [in_threads(everything[0], k, int(150 * scale)) for k in (1, 2, 1, 2)]
    for k, (rate, ms) in zip((1, 2, 1, 2), points, strict=True):
        print(f"    {k} threads {rate:7.1f}/s {ms:6.2f} ms")
    print(f"    1 to 2 threads: {sum(p[0] for p in points[1::2]) / sum(p[0] for p in points[::2]):.2f}x")
    report_served(rounds, scale)


def report_served(rounds: int, scale: float) -> None:
    command = ("-m", "ftserve", "--engine", "null", "--port", "0", "--no-log-requests", "--max-num-seqs", "256")
    server = Server(*command, "--threads", "4", "--mm-cache-gb", "0.1", MODEL)
    try:
        drive(server.port, requests("images", 40, seed=99), 8)  # until the cache is full and its memory goes round
        cases = {
            "distinct image": (requests("images", int(200 * scale)), 9.0),
            "repeated image": (requests("images", 1) * int(500 * scale), 1.0),
            "text": (requests("text", int(500 * scale)), math.inf),
        }
        print("\nServed over the null engine, CPU ms a request in the server's process, and requests a second")
        for name, (items, goal) in cases.items():
            results = [served(server, items) for _ in range(rounds)]
            if name == "distinct image":
                results = [served(server, requests("images", len(items), seed=k + 1)) for k in range(rounds)]
            totals = [sum(spent.values()) for spent, _ in results]
            verdict = "" if goal == math.inf else f"; goal {goal:g}: {'met' if min(totals) <= goal else 'not met'}"
            roles = ", ".join(f"{role} {ms:.2f}" for role, ms in sorted(results[-1][0].items(), key=lambda p: -p[1]))
            rate = statistics.median(rate for _, rate in results)
            print(f"{name:16} {statistics.median(totals):6.2f} ({min(totals):.2f} to {max(totals):.2f}){verdict}")
            print(f"    {rate:.0f} requests/s; by thread: {roles}")
        quiet, busy = fairness(server, 20 * scale + 4, int(300 * scale) + 50)
    finally:
        server.stop()
    print(f"\nText at {TEXT_RATE}/s, ms from sent to answered: p50 and p99")
    for name, values in (("without media", quiet), ("with media", busy)):
        print(f"    {name:14} {quantile(values, 0.5):6.2f} {quantile(values, 0.99):6.2f}")
    print(f"    p99 with by without: {quantile(busy, 0.99) / quantile(quiet, 0.99):.1f}; goal 3")


if __name__ == "__main__":
    main()
