"""The default model: right answers in bfloat16 as it is served, and transformers' own tokens in float32."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest

from ftserve.engine.grammar import GrammarCompiler
from tests.engine.schemas import follows, random_schema

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


def test_bfloat16_logprobs_are_near_those_of_transformers(
    torch: Any, checkpoint: Any, encode: Any, make_request: Any, drain: Any
) -> None:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.bfloat16).eval()
    prompt = encode(STORY)
    stepper = make_stepper(checkpoint, max_num_batched_tokens=7)
    request = make_request(prompt, max_tokens=6, num_logprobs=20, num_prompt_logprobs=20)
    stepper.add(request)
    events = drain(stepper)[request]
    scores = [*events[0].prompt_logprobs[1:], *(score for event in events for score in event.logprobs)]
    text = [*prompt, *(token for event in events for token in event.token_ids)]
    assert [score.token_id for score in scores] == text[1:]
    with torch.inference_mode():
        theirs = reference(torch.tensor([text[:-1]])).logits[0].float().log_softmax(-1)
    # 0.05, 0.2 and 0.02 here; transformers' own bfloat16 and float32 are as far from each other.
    differences = []
    for score, row in zip(scores, theirs, strict=True):
        for token_id, logprob in (
            (score.token_id, score.logprob),
            *zip(score.top_ids, score.top_logprobs, strict=True),
        ):
            expected = float(row[token_id])
            assert abs(math.exp(logprob) - math.exp(expected)) < 0.05
            if expected > -8.0:  # beyond, the logarithm makes much of next to nothing
                differences.append(abs(logprob - expected))
    differences.sort()
    assert statistics.mean(differences) < 0.1
    assert differences[int(0.98 * len(differences))] < 0.4


def test_200_random_schemas_are_followed(
    torch: Any, checkpoint: Any, encode: Any, make_request: Any, drain: Any
) -> None:
    from tokenizers import Tokenizer

    rng = random.Random(5)
    schemas = [random_schema(rng, "é") for _ in range(200)]
    tokenizer = Tokenizer.from_file(str(checkpoint.tokenizer_json))
    compiler = GrammarCompiler(
        checkpoint.tokenizer_json, vocab_size=checkpoint.vocab_size, eos_token_ids=checkpoint.eos_token_ids
    )
    stepper = make_stepper(checkpoint, max_num_seqs=200)
    prompt = encode("JSON:")
    requests = [
        make_request(prompt, max_tokens=120, grammar=compiler.json_schema(schema), temperature=1.0, seed=k)
        for k, schema in enumerate(schemas)
    ]
    for request in requests:
        stepper.add(request)
    events = drain(stepper)
    stepper.close()
    compiler.close()
    for request, schema in zip(requests, schemas, strict=True):
        text = tokenizer.decode([token for event in events[request] for token in event.token_ids])
        assert follows(text, schema), (schema, text)
