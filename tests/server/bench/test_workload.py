"""What the requests of a run say."""

from __future__ import annotations

import base64
import io
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from ftserve.server.bench.arrivals import arrival_times
from ftserve.server.bench.media import clip_maker, jpeg_maker
from ftserve.server.bench.workload import Workload, WorkloadConfig, read_requests


def bodies(count: int, seed: int = 0, **options: Any) -> list[dict[str, Any]]:
    options.setdefault("mix", {"text": 1.0})
    workload = Workload(WorkloadConfig(model="m", **options), seed)
    return [json.loads(item.body) for item in itertools.islice(workload, count)]


def test_the_same_seed_says_the_same() -> None:
    options: dict[str, Any] = {"prompt_words": (5, 50), "max_tokens": (1, 9)}
    assert bodies(20, **options) == bodies(20, **options)
    assert bodies(20, **options) != bodies(20, seed=1, **options)


def test_texts_differ_and_keep_to_their_range() -> None:
    texts = [body["messages"][0]["content"] for body in bodies(50, prompt_words=(10, 20))]
    assert len(set(texts)) == 50
    assert {len(text.split()) - 1 for text in texts} <= set(range(10, 21))


def test_pictures_differ_as_files_and_are_read_as_the_same_picture() -> None:
    image = pytest.importorskip("PIL.Image")
    make = jpeg_maker(64, 48, 1)
    files = [base64.b64decode(make(number).partition(",")[2]) for number in (0, 1, 2**40)]
    assert len(set(files)) == 3
    pixels = {image.open(io.BytesIO(file)).convert("RGB").tobytes() for file in files}
    assert len(pixels) == 1


def test_clips_differ_as_files_and_can_be_read() -> None:
    av = pytest.importorskip("av")
    make = clip_maker(64, 48, 0.5, 1)
    files = [base64.b64decode(make(number).partition(",")[2]) for number in (0, 1)]
    assert files[0] != files[1]
    for file in files:
        with av.open(io.BytesIO(file)) as container:
            assert sum(1 for _ in container.decode(video=0)) == 12


def test_a_share_of_the_pictures_was_sent_before() -> None:
    pytest.importorskip("PIL")
    asked = bodies(40, mix={"images": 1}, image_size=(16, 16), repeat_share=0.5, images_per_request=2)
    urls = [p["image_url"]["url"] for body in asked for p in body["messages"][0]["content"] if "image_url" in p]
    assert len(urls) == 80
    assert 25 < len(set(urls)) < 60


def test_recorded_requests(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "one two three four five six"}]
    (tmp_path / "sharegpt.json").write_text(json.dumps([{"conversations": turns}, {"conversations": turns[1:]}]))
    (tmp_path / "lines.jsonl").write_text('{"prompt": "a", "max_tokens": 3, "x": 1}\n\n{"body": {"messages": []}}\n')
    assert list(read_requests(tmp_path / "sharegpt.json")) == [
        {"messages": [{"role": "user", "content": "Hi?"}], "max_tokens": 8}
    ]
    assert list(read_requests(tmp_path / "lines.jsonl")) == [{"prompt": "a", "max_tokens": 3}, {"messages": []}]
    sent = {(b.get("prompt"), b["max_tokens"]) for b in bodies(20, file=tmp_path / "lines.jsonl", max_tokens=(9, 9))}
    assert sent == {("a", 3), (None, 9)}


def test_a_file_without_requests_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"question": 1}')
    with pytest.raises(ValueError, match="entry 1 has no messages"):
        list(read_requests(tmp_path / "bad.jsonl"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no requests"):
        bodies(1, file=tmp_path / "empty.jsonl")


@pytest.mark.parametrize("kind", ["poisson", "constant", "bursts"])
def test_arrivals_ascend_at_their_rate(kind: str) -> None:
    times = list(itertools.islice(arrival_times(kind, 50.0, rng=random.Random(0)), 5000))
    assert times == sorted(times)
    assert 90 < times[-1] < 110
    assert len(set(times)) == (500 if kind == "bursts" else 5000)
