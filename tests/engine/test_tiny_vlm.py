"""The built-in model `tiny-vlm`: described rightly, and made of what a Qwen2.5-VL checkpoint has."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftserve.engine import builtin
from ftserve.engine.checkpoint import Checkpoint
from ftserve.engine.tiny_vlm import VISION_TOKENS

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def directory() -> Path:
    return builtin.prepare("tiny-vlm")


def test_its_files_say_what_is_needed_to_serve_it(directory: Path) -> None:
    read = Checkpoint.read(directory)
    assert (read.model_type, read.model_max_len, read.vocab_size) == ("qwen2_5_vl", 32768, 49156)
    assert (read.eos_token_ids, read.special_tokens["eos_token"]) == (frozenset({2}), "<|im_end|>")
    assert read.vision is not None
    assert (read.vision.image_token_id, read.vision.video_token_id) == (49154, 49155)


def test_its_tokenizer_knows_the_vision_tokens(directory: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.encode("".join(VISION_TOKENS)).ids == [49152, 49153, 49154, 49155]
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1


def test_transformers_own_processor_takes_it(directory: Path) -> None:
    import numpy as np
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(directory)
    parts = [{"type": "image"}, {"type": "text", "text": "Hi"}, {"type": "video"}]
    text = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        "<|vision_start|><|image_pad|><|vision_end|>Hi<|vision_start|><|video_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    picture = np.zeros((112, 56, 3), np.uint8)
    inputs = processor(text=[text], images=[picture], videos=[np.stack([picture] * 4)], return_tensors="np")
    assert inputs["image_grid_thw"].tolist() == [[1, 8, 4]]
    assert (inputs["input_ids"] == 49154).sum() == 8
    assert (inputs["input_ids"] == 49155).sum() == inputs["video_grid_thw"].prod() // 4
