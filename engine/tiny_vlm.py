"""The built-in model `tiny-vlm`: a Qwen2.5-VL of a few megabytes with random weights, to try pictures and clips with.

What it says makes no sense; how long it takes to say it, and that the same input gives the same answer, does. Its
tokenizer is SmolLM2's with Qwen's vision tokens behind.
"""

from __future__ import annotations

import json
from pathlib import Path

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

_SEED = 2
_WIDTH = 64  # of the text layers, and so of what the vision tower gives them

# In the form of Qwen2.5-VL's own.
_CHAT_TEMPLATE = """\
{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- else %}
{%- for part in message['content'] %}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part['type'] == 'video' or 'video' in part or 'video_url' in part %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part %}
{{- part['text'] }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_IMAGE_PROCESSOR = {
    "processor_class": "Qwen2_5_VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_VIDEO_PROCESSOR = _IMAGE_PROCESSOR | {
    "image_processor_type": None,
    "video_processor_type": "Qwen2VLVideoProcessor",
    "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    "fps": 2.0,
    "min_frames": 4,
    "max_frames": 768,
}


def fill(directory: Path) -> None:
    """Add everything but `tokenizer.json` and `tokenizer_config.json`, which are there, and extend those."""
    first = _add_vision_tokens(directory / "tokenizer.json")
    config = json.loads((directory / "tokenizer_config.json").read_bytes())
    config["model_max_length"] = 32768
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")
    for name, content in (("preprocessor", _IMAGE_PROCESSOR), ("video_preprocessor", _VIDEO_PROCESSOR)):
        present = {key: value for key, value in content.items() if value is not None}
        (directory / f"{name}_config.json").write_text(json.dumps(present, indent=2) + "\n")
    _save_network(first, directory)


def _add_vision_tokens(tokenizer_json: Path) -> int:
    """Add them to the tokenizer in `tokenizer_json`; return the id of the first."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_json))
    first = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in VISION_TOKENS])
    tokenizer.save(str(tokenizer_json))
    return first


def _save_network(first: int, directory: Path) -> None:
    """Save the network; `first` is the id of the first vision token."""
    import torch
    from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": first + len(VISION_TOKENS),
            "hidden_size": _WIDTH,
            "intermediate_size": 2 * _WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "initializer_range": 0.2,  # far enough from uniform that greedy choices are no ties
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": _WIDTH,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.2,
            "tokens_per_second": 2,
        },
        tie_word_embeddings=True,
        vision_start_token_id=first,
        vision_end_token_id=first + 1,
        image_token_id=first + 2,
        video_token_id=first + 3,
    )
    torch.manual_seed(_SEED)  # in the process that prepares models, at start
    network = Qwen2_5_VLForConditionalGeneration(config).bfloat16()
    network.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    network.save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)
