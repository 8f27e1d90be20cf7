"""Clips for a Qwen3-VL, which is told when each step was, through a whole server: it says what transformers says."""

from __future__ import annotations

import base64
import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftserve.engine.checkpoint import resolve
from tests.preprocess.clips import clip
from tests.preprocess.pictures import encoded, picture
from tests.server.serving import RunningServer

pytest.importorskip("torch")

SIDE = 64  # pixels: two by two tokens a step
IMAGES = {"shortest_edge": 32 * 32, "longest_edge": 16 * 32 * 32}
VIDEOS = {"shortest_edge": 4 * 32 * 32, "longest_edge": 256 * 32 * 32}
TEXT = {"type": "text", "text": "What happens?"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with the tokenizer and the template of `tiny-vlm`."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, Qwen2VLImageProcessorPil, Qwen3VLConfig
    from transformers import Qwen3VLForConditionalGeneration as Model
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    source, target = resolve("tiny-vlm"), tmp_path_factory.mktemp("qwen3") / "qwen3-vl"
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    marks = {
        name: tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in (
            ("image_token_id", "image_pad"),
            ("video_token_id", "video_pad"),
            ("vision_start_token_id", "vision_start"),
            ("vision_end_token_id", "vision_end"),
        )
    }
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    tower = {
        "depth": 3,
        "hidden_size": 32,
        "out_hidden_size": 48,
        "intermediate_size": 32,
        "num_heads": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.2,
    }
    torch.manual_seed(3)
    model: Any = Model(Qwen3VLConfig(text_config=text, vision_config=tower, **marks)).float()
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(target)
    scale = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images: Any = Qwen2VLImageProcessorPil(size=IMAGES, **scale)
    made: Any = Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(size=VIDEOS, **scale))
    made.save_pretrained(target)
    shutil.copy(source / "chat_template.jinja", target)
    return target


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    engine = ("--engine", "torch", "--device", "cpu", "--torch-threads", "1", "--max-num-batched-tokens", "30")
    log = tmp_path_factory.mktemp("server") / "log"
    with RunningServer(log, *engine, "--threads", "3", "--served-model-name", "m", str(directory)) as server:
        yield server
        assert "Traceback" not in server.log()


def moving(num_frames: int, rate: int, seed: int) -> bytes:
    """Return a clip whose picture changes with every third frame, of the size that the model sees."""
    return clip(num_frames, rate=rate, picture=lambda k: np.asarray(picture(SIDE, SIDE, seed=seed + k // 3)))


def frames_of(data: bytes) -> Any:
    import av

    with av.open(io.BytesIO(data), "r") as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def expected(
    directory: Path, content: list[dict[str, str]], rate: int, clips: list[Any], images: list[Any]
) -> tuple[list[int], str]:
    """Return the ids of the prompt, and what the model says, both by transformers."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor
    from transformers.video_utils import VideoMetadata

    processor: Any = AutoProcessor.from_pretrained(directory)
    model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(
        text=[text],
        images=images or None,
        videos=[np.moveaxis(clip, -1, 1) for clip in clips],
        video_metadata=[VideoMetadata(total_num_frames=len(clip), fps=float(rate)) for clip in clips],
        do_sample_frames=True,
        return_tensors="pt",
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=None)
    length = inputs["input_ids"].shape[1]
    return output[0, :length].tolist(), processor.tokenizer.decode(output[0, length:])


def url_part(kind: str, mime: str, data: bytes) -> dict[str, Any]:
    return {"type": kind, kind: {"url": f"data:{mime};base64,{base64.b64encode(data).decode()}"}}


@pytest.mark.parametrize(("num_frames", "rate"), [(24, 8), (9, 4)])
def test_clips_and_an_image_are_seen_as_transformers_sees_them(
    directory: Path, server: RunningServer, num_frames: int, rate: int
) -> None:
    one, two = (moving(num_frames, rate, seed) for seed in (10, 50))
    image = picture(SIDE, 2 * SIDE, seed=1)
    wanted = expected(
        directory,
        [{"type": "video"}, {"type": "image"}, TEXT, {"type": "video"}],
        rate,
        [frames_of(one), frames_of(two)],
        [image],
    )
    content = [
        url_part("video_url", "video/mp4", one),
        url_part("image_url", "image/png", encoded(image)),
        TEXT,
        url_part("video_url", "video/mp4", two),
    ]
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
        assert (answer["prompt_token_ids"], answer["choices"][0]["message"]["content"]) == wanted


@pytest.mark.parametrize("size", [(1, 1), (1, 64), (64, 1), (3, 3), (500, 19), (1, 1000), (1000, 1)])
def test_odd_sizes_are_served_or_refused(server: RunningServer, size: tuple[int, int]) -> None:
    """Case 17, with an engine that looks at them."""
    content = [url_part("image_url", "image/png", encoded(picture(*size)))]
    messages = [{"role": "user", "content": content}]
    answer = server.http.post("/v1/chat/completions", json={"model": "m", "messages": messages, "max_tokens": 2})
    assert answer.status_code == (400 if max(size) == 1000 else 200)
