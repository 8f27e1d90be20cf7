"""Vision-language families by their own processors, through a whole server: what it says is what transformers says."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import families
from tests.server.serving import RunningServer

pytest.importorskip("torch")


@pytest.fixture(scope="module", params=families.FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return families.save(request.param, tmp_path_factory.mktemp("family") / request.param)


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    options = ("--engine", "torch", "--device", "cpu", "--torch-threads", "1", "--threads", "3")
    with RunningServer(
        log, *options, "--max-num-batched-tokens", "20", "--served-model-name", "m", str(directory)
    ) as server:
        yield server
        assert server.stop() == 0
        assert "Traceback" not in server.log()


def picture(seed: int, width: int, height: int) -> Any:
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8))


def part(image: Any) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def expected(directory: Path, messages: list[dict[str, Any]], images: list[Any], count: int) -> tuple[list[int], str]:
    """Return the ids of the prompt, and what the model says, both by transformers."""
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

    processor: Any = AutoProcessor.from_pretrained(directory)
    processor.image_processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(images=images or None, text=text, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, max_new_tokens=count, do_sample=False, eos_token_id=None)
    length = inputs["input_ids"].shape[1]
    return output[0, :length].tolist(), processor.tokenizer.decode(output[0, length:])


@pytest.mark.parametrize("size", [(1, 1), (1, 64), (64, 1), (3, 3), (500, 19), (1, 1000), (1000, 1)])
def test_odd_sizes_are_served_or_refused(server: RunningServer, size: tuple[int, int]) -> None:
    """Case 17."""
    messages = [{"role": "user", "content": [part(picture(1, *size))]}]
    answer = server.http.post("/v1/chat/completions", json={"model": "m", "messages": messages, "max_tokens": 2})
    assert answer.status_code in (200, 400)
    if answer.status_code == 400:
        assert answer.json()["error"]["param"] == "messages.0.content.0.image_url"


def test_pictures_are_seen_as_transformers_sees_them(directory: Path, server: RunningServer) -> None:
    small, wide, tall = picture(1, 40, 30), picture(2, 90, 50), picture(3, 30, 100)
    for images in ([small], [wide, tall], [tall, small, wide], []):
        content: list[dict[str, Any]] = [{"type": "text", "text": "What is"}]
        shown: list[dict[str, Any]] = [{"type": "text", "text": "What is"}]
        for image in images:
            content += [part(image), {"type": "text", "text": " and"}]
            shown += [{"type": "image"}, {"type": "text", "text": " and"}]
        ids, said = expected(directory, [{"role": "user", "content": shown}], images, 12)
        for _ in ("cold", "warm"):
            response = server.http.post(
                "/v1/chat/completions",
                json={
                    "model": "m",
                    "messages": [{"role": "user", "content": content}],
                    "max_tokens": 12,
                    "temperature": 0,
                    "ignore_eos": True,
                    "return_token_ids": True,
                    "skip_special_tokens": False,
                },
            )
            assert response.status_code == 200, response.text
            answer = response.json()
            assert answer["prompt_token_ids"] == ids
            assert answer["choices"][0]["message"]["content"] == said
