"""Families of models that the engine serves: tiny random ones say what transformers says; others are refused."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import hearing
from tests.engine.seeing import FAMILIES as SEEING_FAMILIES
from tests.engine.seeing import VOCAB_SIZE
from tests.families import FAMILIES as PROCESSED_FAMILIES

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# transformers' configuration class, and what makes the family special.
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "Qwen2Config": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    "Qwen3Config": {},
    "MistralConfig": {"sliding_window": 7},
    "Gemma2Config": {"sliding_window": 10, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 3.0},
    "Gemma3TextConfig": {"sliding_window": 10, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "SmolLM3Config": {"no_rope_layer_interval": 2},
    "Phi3Config": {"sliding_window": 11},
    "Olmo2Config": {},
    "GptOssConfig": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "MixtralConfig": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeConfig": EXPERTS,
    "GraniteConfig": {"attention_multiplier": 0.2},
}

# Families that are not served, what makes a small one, and the reason that the operator is told.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("MambaConfig", {}, "0 of 4 layers use"),
    ("FalconH1Config", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, "other means"),
    ("BloomConfig", {}, "0 of 4 layers use"),
    ("StableLmConfig", {}, "does not hand keywords on"),
]


@pytest.fixture(scope="module")
def load(make_tiny: Callable[[Any], Any]) -> Callable[[str], Any]:
    """Return a family's tiny model, made once."""
    import transformers

    made: dict[str, Any] = {}

    def get(family: str) -> Any:
        if family not in made:
            made[family] = make_tiny(getattr(transformers, family)(**SMALL | FAMILIES[family]))
        return made[family]

    return get


@pytest.mark.parametrize("native", [False, True], ids=["stock", "native"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(
    family: str, native: bool, load: Any, make_request: Any, texts: Any, kernel: Any
) -> None:
    tiny = load(family)
    rng = random.Random(1)
    asked = [[rng.randrange(1, 128) for _ in range(n)] for n in (1, 9, 33, 20)]
    batcher = tiny.batcher(chunk=11, kernel=kernel if native else None)
    got = texts(batcher, [make_request(p, max_tokens=20) for p in asked])
    assert got == [tiny.greedy(p, 20) for p in asked]


@pytest.mark.parametrize(("family", "options", "message"), REFUSED)
def test_others_are_refused(family: str, options: dict[str, Any], message: str, torch: Any, tmp_path: Any) -> None:
    import transformers

    from ftserve.engine.loader import UnsupportedModelError, load_model, probe_layers

    config = getattr(transformers, family)(**SMALL | options)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=message):
        probe_layers(load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32))


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        ("LlamaConfig", {"rope_type": "dynamic", "factor": 2.0}),
        (
            "Phi3Config",
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
)
def test_positions_that_depend_on_the_longest_of_a_batch_are_refused(
    family: str, rope: dict[str, Any], torch: Any
) -> None:
    import transformers

    from ftserve.engine.loader import UnsupportedModelError, prepare_model

    config = getattr(transformers, family)(**SMALL | {"rope_parameters": rope | {"rope_theta": 1e4}})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match=f"rope type {rope['rope_type']} turns all keys"):
        prepare_model(model, torch.device("cpu"))


def test_the_documentation_lists_what_was_run() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    language, vision, audio, refused = (
        set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE)) for section in text.split("\n## ")[1:5]
    )
    assert language == set(FAMILIES)
    assert vision == {*SEEING_FAMILIES, *PROCESSED_FAMILIES}
    assert audio == {type(hearing.make_config(VOCAB_SIZE, 1)).__name__}
    assert refused == {family for family, _, _ in REFUSED}
