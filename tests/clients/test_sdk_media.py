"""Images and a video through OpenAI's SDK, with the words that transformers' processor and `generate` give."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI
from PIL import Image

from ftserve.engine.checkpoint import Checkpoint, resolve
from ftserve.preprocess.chat import ChatTemplate
from tests.preprocess.clips import clip
from tests.preprocess.pictures import encoded, picture
from tests.server.serving import RunningServer

pytest.importorskip("transformers")  # which the environment of the other SDKs lacks

MODEL = "tiny-vlm"
NUM_TOKENS = 12
QUESTION = "What do you see?"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    options = ("--dtype", "float32", "--device", "cpu", "--kv-cache-gb", "0.1", "--torch-threads", "1")
    with RunningServer(tmp_path_factory.mktemp("sdk") / "log", *options, MODEL) as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
            yield made
        assert "Traceback" not in server.log()


@cache
def reference() -> tuple[Any, Any, ChatTemplate]:
    """Return the model in float32, its processor, and its chat template."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    directory = resolve(MODEL)
    checkpoint = Checkpoint.read(directory)
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    processor: Any = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor.from_pretrained(directory),
        tokenizer=PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json")),
        video_processor=Qwen2VLVideoProcessor.from_pretrained(directory, cap_pixels_per_frame=False),
        chat_template=checkpoint.chat_template,
    )
    assert checkpoint.chat_template is not None
    return model, processor, ChatTemplate(checkpoint.chat_template, checkpoint.special_tokens)


def expected(parts: list[dict[str, str]], **media: Any) -> str:
    """Return what the model says to `parts` with what the processor makes of `media`."""
    model, processor, template = reference()
    text = template.render([{"role": "user", "content": parts}])
    inputs = processor(text=[text], return_tensors="pt", **media)
    out = model.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    said: str = processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return said


def ask(client: OpenAI, *parts: dict[str, Any], stream: bool = False) -> str:
    messages: Any = [{"role": "user", "content": list(parts)}]
    fields: Any = {"model": MODEL, "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0}
    if stream:
        return "".join(
            chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**fields, stream=True)
        )
    said = client.chat.completions.create(**fields).choices[0].message.content
    assert isinstance(said, str)
    return said


def part(kind: str, data: bytes, mime: str) -> dict[str, Any]:
    return {"type": kind, kind: {"url": f"data:{mime};base64,{base64.b64encode(data).decode()}"}}


TEXT = {"type": "text", "text": QUESTION}


@pytest.mark.model
@pytest.mark.parametrize("stream", [False, True])
def test_an_image_between_texts(client: OpenAI, stream: bool) -> None:
    image = picture(280, 196)
    said = ask(
        client, {"type": "text", "text": "Look: "}, part("image_url", encoded(image), "image/png"), TEXT, stream=stream
    )
    parts = [{"type": "text", "text": "Look: "}, {"type": "image"}, {"type": "text", "text": QUESTION}]
    assert said == expected(parts, images=[image])


@pytest.mark.model
def test_several_images_of_odd_sizes(client: OpenAI) -> None:
    images = [picture(300, 211, 1), picture(57, 91, 2), picture(640, 480, 3)]
    said = ask(client, *(part("image_url", encoded(image), "image/png") for image in images), TEXT)
    assert said == expected([{"type": "image"}] * 3 + [{"type": "text", "text": QUESTION}], images=images)


@pytest.mark.model
def test_a_video_and_an_image(client: OpenAI, tmp_path: Path) -> None:
    import av
    from transformers.video_utils import VideoMetadata

    data = clip(20, rate=5, picture=lambda k: np.asarray(picture(224, 140, seed=k // 4)))
    path = tmp_path / "clip.mp4"
    path.write_bytes(data)
    with av.open(str(path), "r") as container:
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    image = Image.fromarray(frames[0])
    said = ask(client, part("video_url", data, "video/mp4"), part("image_url", encoded(image), "image/png"), TEXT)
    parts = [{"type": "video"}, {"type": "image"}, {"type": "text", "text": QUESTION}]
    metadata = VideoMetadata(total_num_frames=20, fps=5.0)
    assert said == expected(
        parts,
        images=[image],
        videos=[np.moveaxis(frames, -1, 1)],
        video_metadata=[metadata],
        do_sample_frames=True,
        fps=2.0,
    )
