"""Tiny random vision-language models of several families, as directories with the processors of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftserve.engine.checkpoint import resolve

_TEXT: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
    "initializer_range": 0.2,
}


@dataclass(frozen=True)
class Family:
    """How a family's model and processor are made of nothing."""

    tokens: tuple[str, ...]  # beside SmolLM2's; the first is shown in the place of an image
    processor: Callable[[Any], Any]  # of the tokenizer
    config: Callable[[dict[str, Any], Callable[[str], int]], Any]  # of the text's part, and of ids by token


def _idefics3(tokenizer: Any) -> Any:
    from transformers import Idefics3ImageProcessorPil, Idefics3Processor

    images = Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return Idefics3Processor(images, tokenizer, image_seq_len=4)


def _smolvlm(tokenizer: Any) -> Any:
    import transformers as made_of

    images = made_of.SmolVLMImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    videos = made_of.SmolVLMVideoProcessor()  # type: ignore[attr-defined]
    return made_of.SmolVLMProcessor(images, tokenizer, videos, image_seq_len=4)


def _pixtral(tokenizer: Any) -> Any:
    from transformers import PixtralImageProcessorPil, PixtralProcessor

    images = PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size={"height": 8, "width": 8})
    return PixtralProcessor(images, tokenizer, patch_size=8, spatial_merge_size=2)


def _llava(tokenizer: Any) -> Any:
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    images = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


_PINPOINTS = [[height, width] for height in (32, 64) for width in (32, 64)]


def _onevision(tokenizer: Any) -> Any:
    import transformers as made_of

    images = made_of.LlavaOnevisionImageProcessorPil(size={"height": 32, "width": 32}, image_grid_pinpoints=_PINPOINTS)
    videos = made_of.LlavaOnevisionVideoProcessor()
    return made_of.LlavaOnevisionProcessor(
        images, tokenizer, videos, num_image_tokens=16, vision_feature_select_strategy="full"
    )


def _tiled_config(name: str) -> Callable[[dict[str, Any], Callable[[str], int]], Any]:
    def make(text: dict[str, Any], id_of: Callable[[str], int]) -> Any:
        import transformers

        return getattr(transformers, name)(
            text_config={"model_type": "llama"} | text,
            vision_config=_TOWER | {"image_size": 32},
            image_token_id=id_of("<image>"),
            scale_factor=2,
            pad_token_id=0,
        )

    return make


def _mistral3_config(text: dict[str, Any], id_of: Callable[[str], int]) -> Any:
    from transformers import Mistral3Config

    return Mistral3Config(
        text_config={"model_type": "mistral"} | text,
        vision_config={"model_type": "pixtral"} | _TOWER | {"image_size": 64, "head_dim": 16},
        image_token_index=id_of("[IMG]"),
        spatial_merge_size=2,
    )


def _llava_config(text: dict[str, Any], id_of: Callable[[str], int]) -> Any:
    from transformers import LlavaConfig

    return LlavaConfig(
        text_config={"model_type": "llama"} | text,
        vision_config={"model_type": "clip_vision_model"} | _TOWER | {"image_size": 32, "projection_dim": 32},
        image_token_index=id_of("<image>"),
        vision_feature_layer=-1,
    )


def _onevision_config(text: dict[str, Any], id_of: Callable[[str], int]) -> Any:
    from transformers import LlavaOnevisionConfig

    return LlavaOnevisionConfig(
        text_config={"model_type": "qwen2"} | text,
        vision_config={"model_type": "siglip_vision_model", "vision_use_head": False} | _TOWER | {"image_size": 32},
        image_token_index=id_of("<image>"),
        video_token_index=id_of("<video>"),
        image_grid_pinpoints=_PINPOINTS,
        vision_feature_layer=-1,
    )


_TILES = (
    *("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)

FAMILIES = {
    "Idefics3Config": Family(_TILES, _idefics3, _tiled_config("Idefics3Config")),
    "SmolVLMConfig": Family(_TILES, _smolvlm, _tiled_config("SmolVLMConfig")),
    "Mistral3Config": Family(("[IMG]", "[IMG_BREAK]", "[IMG_END]"), _pixtral, _mistral3_config),
    "LlavaConfig": Family(("<image>",), _llava, _llava_config),
    "LlavaOnevisionConfig": Family(("<image>", "<video>"), _onevision, _onevision_config),
}

_TEMPLATE = """\
{%- for message in messages %}
{{- message['role'] + ': ' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' %}{{- 'MARK' }}{%- else %}{{- part['text'] }}{%- endif %}
{%- endfor %}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}
"""


def save(family: str, directory: Path) -> Path:
    """Write a whole checkpoint in float32 and return the directory."""
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

    how = FAMILIES[family]
    tokenizer: Any = AutoTokenizer.from_pretrained(resolve("smollm2-135m-instruct"))
    tokenizer.add_special_tokens({"additional_special_tokens": list(how.tokens)})
    tokenizer.chat_template = _TEMPLATE.replace("MARK", how.tokens[0])
    config = how.config(_TEXT | {"vocab_size": len(tokenizer)}, tokenizer.convert_tokens_to_ids)
    torch.manual_seed(1)
    model: Any = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(directory)
    how.processor(tokenizer).save_pretrained(directory)
    return directory
