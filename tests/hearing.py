"""A tiny random Qwen2-Audio, and a directory of it with its own processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ftserve.engine.checkpoint import resolve

SECONDS = 2  # that it hears of a clip
RATE = 16000
TOKENS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|im_start|>", "<|im_end|>")
HIDDEN_SIZE = 48

TEXT: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOWER: dict[str, Any] = {
    "model_type": "qwen2_audio_encoder",
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "max_source_positions": 50 * SECONDS,
    "initializer_range": 0.2,
}

# What Qwen2-Audio's own does, in short.
_TEMPLATE = """\
{%- set count = namespace(value=0) %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{- message['content'] }}
{%- else %}
{%- for content in message['content'] %}
{%- if 'audio' in content or 'audio_url' in content %}
{%- set count.value = count.value + 1 %}
{{- 'Audio ' + count.value|string + ': <|audio_bos|><|AUDIO|><|audio_eos|>\\n' }}
{%- elif 'text' in content %}{{- content['text'] }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def make_config(vocab_size: int, audio_token_id: int) -> Any:
    from transformers import Qwen2AudioConfig

    return Qwen2AudioConfig(
        text_config=TEXT | {"vocab_size": vocab_size}, audio_config=TOWER, audio_token_index=audio_token_id
    )


def make_extractor() -> Any:
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=TOWER["num_mel_bins"], chunk_length=SECONDS)


def save(directory: Path) -> Path:
    """Write a whole checkpoint in float32 and return the directory."""
    import torch
    from transformers import AutoModelForMultimodalLM, AutoTokenizer, GenerationConfig, Qwen2AudioProcessor

    tokenizer: Any = AutoTokenizer.from_pretrained(resolve("smollm2-135m-instruct"))
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    tokenizer.chat_template = _TEMPLATE
    torch.manual_seed(1)
    config = make_config(len(tokenizer), tokenizer.convert_tokens_to_ids("<|AUDIO|>"))
    model: Any = AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model.save_pretrained(directory)
    Qwen2AudioProcessor(make_extractor(), tokenizer, chat_template=_TEMPLATE).save_pretrained(directory)
    return directory
