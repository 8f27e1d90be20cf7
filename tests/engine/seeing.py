"""Tiny random vision-language models in float32, and prompts that show them pictures and clips."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any

import numpy as np

from ftserve.engine.checkpoint import AudioInputs, Normalization, VisionInputs
from ftserve.engine.types import MediaItem, MediaSpan, Modality
from tests.engine.conftest import Tiny

VOCAB_SIZE = 128
IMAGE, VIDEO, START, END = 100, 101, 102, 103
INPUTS = VisionInputs(
    image_token_id=IMAGE,
    video_token_id=VIDEO,
    image=Normalization(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4)),
    video=Normalization(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
)
PATCH = 4
ROW_LEN = 3 * 2 * PATCH * PATCH

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOWER: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": PATCH, "initializer_range": 0.2}
_TOWER_25 = _TOWER | {"hidden_size": 32, "out_hidden_size": 48, "intermediate_size": 32}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
_TOWER_3 = _TOWER_25 | {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}

# transformers' configuration class, and what text layers and vision tower need beside the above.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2VLConfig": ({}, _TOWER | {"embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2}),
    "Qwen2_5_VLConfig": (
        {},
        _TOWER_25 | {"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2},
    ),
    "Qwen3VLConfig": ({"head_dim": 8}, _TOWER_3),
    "Qwen3VLMoeConfig": ({"head_dim": 8} | _MOE, _TOWER_3),
}


class Prompt:
    """Token ids with pictures and clips in them, as the engine takes them and as transformers does."""

    def __init__(self, family: str) -> None:
        self.ids: list[int] = []
        self.media: list[MediaSpan] = []
        self._a_span_a_step = "Qwen3" in family
        self._counts_seconds = "Qwen2_5" in family

    def say(self, *ids: int) -> Prompt:
        self.ids += ids
        return self

    def show(self, item: MediaItem) -> Prompt:
        """Show an item between its marks, in the way of the family."""
        steps: list[int | None] = [None]
        if item.modality is Modality.VIDEO and self._a_span_a_step:
            steps = list(range(item.grid[0]))
        for step in steps:
            span = MediaSpan(item, len(self.ids) + 1, step)
            token = IMAGE if item.modality is Modality.IMAGE else VIDEO
            self.ids += [START, *[token] * span.num_tokens, END]
            self.media.append(span)
            if step is not None:
                self.ids.append(50 + step)  # stands for the time, which is text
        return self

    def inputs(self) -> dict[str, Any]:
        """Return what `generate` wants to know, with pixels as the model's processor makes them."""
        import torch

        ids = torch.tensor([self.ids])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        inputs["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
        items = list(dict.fromkeys((span.item, id(span) if span.step is None else 0) for span in self.media))
        for modality, suffix, scale in ((Modality.IMAGE, "", INPUTS.image), (Modality.VIDEO, "_videos", INPUTS.video)):
            shown = [item for item, _ in items if item.modality is modality]
            if not shown:
                continue
            name = modality.value
            inputs[f"{name}_grid_thw"] = torch.tensor([item.grid for item in shown])
            mean, std = (np.repeat(np.array(v, np.float32) * 255, ROW_LEN // 3) for v in (scale.mean, scale.std))
            pixels = np.concatenate([(item.own_patches - mean) / std for item in shown]).astype(np.float32)
            inputs[f"pixel_values{suffix}"] = torch.from_numpy(pixels)
            if modality is Modality.VIDEO and self._counts_seconds:
                inputs["second_per_grid_ts"] = torch.tensor([item.second_per_grid for item in shown])
        return inputs


def picture(rng: random.Random, grid: tuple[int, int, int] | None = None) -> MediaItem:
    """Return an image, or with a grid of several steps a clip, of noise."""
    t, height, width = grid or (1, 2 * rng.randint(1, 4), 2 * rng.randint(1, 4))
    noise = np.random.default_rng(rng.randrange(1 << 30))
    return MediaItem(
        modality=Modality.IMAGE if t == 1 else Modality.VIDEO,
        patches=noise.integers(0, 256, (t * height * width, ROW_LEN), np.uint8),
        grid=(t, height, width),
        num_tokens=t * height * width // 4,
        digest=noise.bytes(16),
    )


class TinySeeing:
    """One random model, twice with the same weights: as transformers runs it, and as the engine does."""

    inputs: VisionInputs | AudioInputs = INPUTS

    def __init__(self, family: str) -> None:
        import torch
        import transformers

        torch.manual_seed(0)
        text, tower = FAMILIES[family]
        config = getattr(transformers, family)(
            text_config=_TEXT | text,
            vision_config=tower,
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=START,
            vision_end_token_id=END,
        )
        self._family = family
        self._make(config)

    def _make(self, config: Any) -> None:
        import torch
        from transformers import AutoModelForMultimodalLM

        from ftserve.engine import attention, loader

        attention.register()
        kind: Any = AutoModelForMultimodalLM
        parts = loader.attention_of_parts()
        self.reference = kind.from_config(
            config, attn_implementation=dict.fromkeys(parts, "eager"), dtype=torch.float32
        ).eval()
        ours = kind.from_config(copy.deepcopy(config), attn_implementation=parts, dtype=torch.float32)
        ours.load_state_dict(self.reference.state_dict())
        self.model = loader.prepare_model(ours, torch.device("cpu"))
        self._answers: dict[Prompt, list[int]] = {}

    def prompt(self) -> Prompt:
        return Prompt(self._family)

    def greedy(self, prompt: Prompt, count: int) -> list[int]:
        """Return the first `count` (24 at most) tokens that `transformers.generate` says after the prompt."""
        if prompt not in self._answers:
            output = self.reference.generate(
                **prompt.inputs(), max_new_tokens=24, do_sample=False, pad_token_id=0, eos_token_id=None
            )
            self._answers[prompt] = output[0, len(prompt.ids) :].tolist()
        return self._answers[prompt][:count]

    def follows(self, prompt: Prompt, answer: list[int]) -> bool:
        """Tell whether each token of the answer is the likeliest one after those before it."""
        import torch

        whole = self.prompt().say(*prompt.ids, *answer)
        whole.media = prompt.media
        with torch.no_grad():
            logits = self.reference(**whole.inputs()).logits[0]
        likeliest: list[int] = logits[len(prompt.ids) - 1 : -1].argmax(-1).tolist()
        return likeliest == answer

    def batcher(
        self,
        *,
        num_blocks: int = 512,
        block_size: int = 4,
        max_num_seqs: int = 16,
        chunk: int = 64,
        use_prefix_cache: bool = True,
        encoder_bytes: int = 1 << 20,
        eos_token_ids: Iterable[int] = (),
    ) -> Any:
        """Return an engine over the model."""
        import torch

        from ftserve.engine.batcher import ContinuousBatcher
        from ftserve.engine.blocks import BlockPool
        from ftserve.engine.kv_cache import KVCache
        from ftserve.engine.loader import probe_layers
        from ftserve.engine.sampler import Sampler
        from ftserve.engine.scheduler import Scheduler
        from ftserve.engine.vision_runner import make_encoder_cache, make_runner, make_tower

        cpu, max_model_len = torch.device("cpu"), 400
        tower = make_tower(self.model, self.inputs, max_bytes=encoder_bytes)
        cache = KVCache(probe_layers(self.model), num_blocks, block_size, dtype=torch.float32, device=cpu)
        return ContinuousBatcher(
            Scheduler(
                BlockPool(num_blocks, block_size),
                max_num_seqs=max_num_seqs,
                max_prefill_tokens=chunk,
                use_prefix_cache=use_prefix_cache,
                encoder=make_encoder_cache(tower, chunk),
            ),
            make_runner(self.model, tower, cache, max_num_seqs=max_num_seqs, max_model_len=max_model_len),
            Sampler(VOCAB_SIZE, cpu),
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            eos_token_ids=frozenset(eos_token_ids),
            media=tower,
            is_asynchronous=Tiny.is_asynchronous,
        )
