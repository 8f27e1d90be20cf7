"""Images under load: clients that leave, bodies full of base64, texts and health checks beside them."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from PIL import Image

from tests.preprocess.clips import clip, numbered
from tests.preprocess.pictures import encoded, picture
from tests.server.serving import NULL_ENGINE, RunningServer, wait_until
from tests.server.sockets import Connection, post

MODEL = "tiny-vlm"
CHAT = "/v1/chat/completions"


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:;base64," + base64.b64encode(data).decode()}}


def chat(*parts: dict[str, Any], text: str = "What?", **fields: object) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": text}]
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 3, **fields}


@cache
def large_png(number: int) -> bytes:
    """Return a file of 2048 x 2048 pixels that is soon made, and costs as much to decode as any other."""
    image = Image.new("RGB", (2048, 2048), (number, 100, 200))
    image.putpixel((number, number), (255, 255, 255))
    return encoded(image, compress_level=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    options = ("--mm-cache-gb", "0.05", "--decoding-megapixels", "9", "--preprocess-threads", "2")
    with RunningServer(tmp_path_factory.mktemp("load") / "log", *NULL_ENGINE, *options, MODEL) as running:
        yield running
        assert running.stop() == 0
        assert "Traceback" not in running.log()


def is_quiet(server: RunningServer) -> bool:
    metrics = server.metrics()
    gauges = ("mm_in_flight", "mm_pixels_decoding", "mm_pixels_waiting", "mm_queue_depth")
    return server.is_idle() and not any(metrics[f"ftserve_{gauge}"] for gauge in gauges)


async def ask_and_leave(port: int, number: int, rng: random.Random) -> None:
    connection = await Connection.open(port)
    parts = [image_part(large_png(number % 8)), image_part(encoded(picture(64, 64, number)))]
    await connection.send(post(CHAT, chat(*parts, cache_salt=str(number))))
    await asyncio.sleep(rng.random() * 0.05)
    await connection.close(with_reset=rng.random() < 0.5)


def test_images_of_clients_that_have_gone_are_given_up(server: RunningServer) -> None:
    rng, before = random.Random(0), server.metric("mm_decodes_total")

    async def run() -> None:
        await asyncio.gather(*(ask_and_leave(server.port, number, rng) for number in range(60)))

    asyncio.run(run())
    wait_until(lambda: is_quiet(server), "nothing is left of them", 30)
    assert server.metric("mm_decodes_total") - before < 120
    assert server.http.post(CHAT, json=chat(image_part(large_png(0)))).status_code == 200


def test_a_large_body_that_is_cut_short_or_malformed_is_answered(server: RunningServer) -> None:
    body = chat(image_part(bytes(1 << 20)))
    assert server.http.post(CHAT, json=body).status_code == 422
    text = post(CHAT, body).split(b"\r\n\r\n", 1)[1]
    answer = server.http.post(CHAT, content=text[:-1], headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert server.http.post(CHAT, json=chat(text="word " * 60_000)).status_code == 400


def test_health_and_texts_are_answered_while_images_are_decoded(server: RunningServer) -> None:
    """Case 27."""
    parts = [image_part(large_png(number)) for number in range(128)]
    bodies = [chat(*parts[4 * k : 4 * k + 4], cache_salt=str(k)) for k in range(32)]
    num_answered = 0
    with ThreadPoolExecutor(32) as clients:
        asked = [clients.submit(server.http.post, CHAT, json=body) for body in bodies]
        while not all(answer.done() for answer in asked):
            assert server.get("/health").status_code == 200
            assert server.http.post(CHAT, json=chat(text="Hello")).status_code == 200
            num_answered += 1
    assert {answer.result().status_code for answer in asked} == {200}
    assert num_answered > 1


def test_images_videos_texts_and_bad_words_at_once(server: RunningServer) -> None:
    """All of them share the tokenizer's file, the cache and the template."""
    video = base64.b64encode(clip(8, picture=lambda k: numbered(k, 96, 64))).decode()
    clip_part = {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{video}"}}
    bodies = []
    for k in range(90):
        parts = [
            [],
            [image_part(encoded(picture(60, 60, k % 5)))],
            [clip_part, image_part(encoded(picture(90, 60, k)))],
        ]
        fields: dict[str, Any] = {"bad_words": ["never"]} if k % 2 else {}
        bodies.append(chat(*parts[k % 3], text=f"Number {k}", **fields))
    with ThreadPoolExecutor(30) as clients:
        answers = list(clients.map(lambda body: server.http.post(CHAT, json=body), bodies))
    assert {answer.status_code for answer in answers} == {200}
    wait_until(lambda: is_quiet(server), "all are done")


def test_stopping_ends_requests_whose_images_are_on_their_way(tmp_path_factory: pytest.TempPathFactory) -> None:
    options = ("--decoding-megapixels", "1", "--preprocess-threads", "1", "--shutdown-timeout", "0")
    log = tmp_path_factory.mktemp("stop") / "log"
    with RunningServer(log, *NULL_ENGINE, *options, MODEL) as server, ThreadPoolExecutor(4) as clients:
        bodies = [chat(*(image_part(large_png(8 * k + n)) for n in range(8))) for k in range(4)]
        asked = [clients.submit(server.http.post, CHAT, json=body) for body in bodies]
        wait_until(lambda: server.metric("mm_pixels_waiting") > 0, "some images wait for room", 30)
        assert server.stop() == 0
        statuses = {answer.result().status_code for answer in asked if answer.exception() is None}
        assert statuses <= {200, 503}
        assert "Traceback" not in server.log()
