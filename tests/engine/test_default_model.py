"""The default model: right answers in bfloat16 as it is served, and transformers' own tokens in float32."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.model

QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
STORY = (
    "<|im_start|>user\nTell me about the sea, ships and 12 sailors.<|im_end|>\n<|im_start|>assistant\nOnce upon a time"
)


@pytest.fixture(scope="module")
def checkpoint() -> Any:
    from ftserve.engine.checkpoint import Checkpoint, resolve

    return Checkpoint.read(resolve("smollm2-135m-instruct"))


@pytest.fixture(scope="module")
def encode(checkpoint: Any) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(checkpoint.tokenizer_json))
    return lambda text: tokenizer.encode(text).ids


def make_stepper(checkpoint: Any, **options: Any) -> Any:
    from ftserve.engine.config import EngineConfig
    from ftserve.engine.torch_stepper import TorchStepper

    return TorchStepper(EngineConfig(device="cpu", torch_threads=1, kv_cache_gb=0.2, **options), checkpoint)


def test_it_knows_paris(torch: Any, checkpoint: Any, encode: Any, make_request: Any, texts: Any) -> None:
    stepper = make_stepper(checkpoint)
    assert stepper.describe()["dtype"] == "bfloat16"
    [answer] = texts(stepper, [make_request(encode(QUESTION), max_tokens=20)])
    assert answer == encode("The capital of France is Paris.<|im_end|>")


def test_float32_text_is_that_of_transformers(
    torch: Any, checkpoint: Any, encode: Any, make_request: Any, texts: Any
) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32).eval()
    asked = [encode(QUESTION), encode(STORY), encode(STORY + ", long ago, there was")]
    wanted = []
    for prompt in asked:
        ids = torch.tensor([prompt])
        output = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        wanted.append(output[0, len(prompt) :].tolist())
    stepper = make_stepper(checkpoint, dtype="float32", max_num_batched_tokens=16)
    assert texts(stepper, [make_request(prompt, max_tokens=24) for prompt in asked]) == wanted


def test_bfloat16_logits_are_near_those_of_transformers(
    torch: Any, checkpoint: Any, encode: Any, make_request: Any
) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.bfloat16).eval()
    prompt = encode(STORY)
    stepper = make_stepper(checkpoint, max_num_batched_tokens=7)
    seen, run = [], stepper._runner.run

    def watch(plan: Any) -> Any:
        seen.append(run(plan))
        return seen[-1]

    stepper._runner.run = watch
    request = make_request(prompt, max_tokens=6)
    stepper.add(request)
    text = list(prompt)
    while stepper.num_running() or stepper.num_waiting():
        for event in stepper.step():
            text += event.token_ids
    ours = torch.cat(seen).float().log_softmax(-1)  # one row per sampled token
    with torch.inference_mode():
        theirs = reference(torch.tensor([text[:-1]])).logits[0, len(prompt) - 1 :].float().log_softmax(-1)
    likely = theirs > -8.0  # where rounding is not amplified by the logarithm of next to nothing
    assert float((ours - theirs)[likely].abs().max()) < 0.3
    assert float((ours.exp() - theirs.exp()).abs().max()) < 0.05
