"""Vectors of texts, beside what transformers computes for each text alone."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, BertConfig, BertModel, LlamaConfig, LlamaModel, PreTrainedModel

from ftserve.engine.checkpoint import Checkpoint, CheckpointError, resolve
from ftserve.engine.config import EngineConfig
from ftserve.engine.embedding import EmbeddingStepper, embed, make_embedding_stepper
from ftserve.engine.errors import InvalidRequestError, RequestTooLongError
from ftserve.engine.pooling import Pooling, PoolingKind, read_pooling
from ftserve.engine.types import FinishReason, GenerationRequest, SamplingParams
from ftserve.preprocess.tokens import make_encoder

TEXTS = ("A cat sits on the mat.", "Il gatto dorme.", "hi", "Kernel scheduling under memory pressure " * 8)


def loaded(model: PreTrainedModel) -> PreTrainedModel:
    model.eval()
    return model


@pytest.fixture(scope="module")
def bert() -> PreTrainedModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64,
    )  # fmt: skip
    return loaded(BertModel(config, add_pooling_layer=False))


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64,
    )  # fmt: skip
    return loaded(LlamaModel(config))


def request(ids: list[int], index: int = 0, priority: int = 0) -> GenerationRequest:
    return GenerationRequest(
        request_id="r", index=index, prompt_ids=array("I", ids), sampling=SamplingParams(max_tokens=1), lane=0,
        route=None, priority=priority,
    )  # fmt: skip


def stepper_of(model: PreTrainedModel, **limits: int) -> EmbeddingStepper:
    limits = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64} | limits
    return EmbeddingStepper(model, Pooling(PoolingKind.MEAN), vocab_size=99, **limits)


def texts(count: int = 5) -> list[list[int]]:
    made = random.Random(1)
    return [[made.randrange(1, 99) for _ in range(made.randrange(1, 40))] for _ in range(count)]


@pytest.mark.parametrize("kind", PoolingKind)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_batch_gives_what_each_text_gives_alone(
    kind: PoolingKind, family: str, request: pytest.FixtureRequest
) -> None:
    model: PreTrainedModel = request.getfixturevalue(family)
    together = embed(model, texts(), Pooling(kind, normalize=False))
    for ids, vector in zip(texts(), together, strict=True):
        with torch.inference_mode():
            hidden = model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        expected = {
            PoolingKind.CLS: hidden[0],
            PoolingKind.LAST: hidden[-1],
            PoolingKind.MEAN: hidden.mean(0),
            PoolingKind.MAX: hidden.amax(0),
        }[kind]
        torch.testing.assert_close(vector, expected, rtol=1e-4, atol=1e-5)


def test_vectors_have_length_one_where_asked(bert: PreTrainedModel) -> None:
    vectors = embed(bert, texts(), Pooling(PoolingKind.MEAN))
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(5))


def test_each_request_gets_one_final_event(bert: PreTrainedModel) -> None:
    stepper = stepper_of(bert, max_num_batched_tokens=50)
    requests = [request(ids, index) for index, ids in enumerate(texts(20))]
    for one in requests:
        stepper.add(one)
    events = []
    while stepper.num_waiting():
        step = stepper.step()
        assert len(step) == 1 or len(step) * max(len(event.request.prompt_ids) for event in step) <= 50
        events += step
    assert {event.request for event in events} == set(requests)
    assert len(events) == len(requests)
    assert all(event.finish_reason is FinishReason.STOP and event.embedding is not None for event in events)


def test_the_oldest_of_the_highest_priority_is_always_taken(bert: PreTrainedModel) -> None:
    stepper = stepper_of(bert, max_num_batched_tokens=40)
    long, short, urgent = request([1] * 40), request([2] * 3), request([3] * 4, priority=-1)
    for one in (long, short, urgent):
        stepper.add(one)
    assert [event.request for event in stepper.step()] == [urgent, short]
    assert [event.request for event in stepper.step()] == [long]


def test_what_was_cancelled_is_forgotten(bert: PreTrainedModel) -> None:
    stepper = stepper_of(bert)
    one = request([1, 2])
    stepper.add(one)
    stepper.cancel(one)
    assert stepper.num_waiting() == 0


@pytest.mark.parametrize(
    ("ids", "error"), [([], InvalidRequestError), ([99], InvalidRequestError), ([1] * 65, RequestTooLongError)]
)
def test_what_cannot_be_embedded_is_refused(bert: PreTrainedModel, ids: list[int], error: type[Exception]) -> None:
    stepper = stepper_of(bert)
    with pytest.raises(error):
        stepper.add(request(ids))
    assert stepper.num_waiting() == 0


def write_modules(path: Path, *types: str, **pooling: object) -> None:
    modules = [{"path": "1_Pooling" if name == "Pooling" else "", "type": f"x.models.{name}"} for name in types]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def test_pooling_is_read_from_sentence_transformers_files(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) is None
    write_modules(tmp_path, "Transformer", "Pooling", pooling_mode_lasttoken=True, pooling_mode_cls_token=False)
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    assert read_pooling(tmp_path) == Pooling(PoolingKind.LAST, normalize=False, max_len=128)


@pytest.mark.parametrize(
    ("types", "pooling", "words"),
    [
        (("Transformer", "Dense"), {}, "Dense"),
        (("Transformer", "Pooling"), {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        (("Transformer", "Pooling"), {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "max_tokens"),
    ],
)
def test_pooling_that_is_not_served_is_named(
    tmp_path: Path, types: tuple[str, ...], pooling: dict[str, object], words: str
) -> None:
    write_modules(tmp_path, *types, **pooling)
    with pytest.raises(ValueError, match=words):
        read_pooling(tmp_path)


@pytest.mark.model
def test_the_builtin_model_gives_what_its_files_say() -> None:
    """Mean over tokens and length 1, as sentence-transformers does for this model; float32, unpadded, one by one."""
    path = resolve("all-minilm-l6-v2")
    checkpoint = Checkpoint.read(path)
    assert (checkpoint.is_generating, checkpoint.model_max_len, checkpoint.hidden_size) == (False, 256, 384)
    assert checkpoint.pooling == Pooling(PoolingKind.MEAN, normalize=True, max_len=256)
    config = EngineConfig(torch_threads=1).resolve(model_max_len=checkpoint.model_max_len)
    stepper = make_embedding_stepper(config, checkpoint)
    encode = make_encoder(checkpoint.tokenizer_json, use_fastokens=False)
    requests = [request(encode(text, True).tolist(), index) for index, text in enumerate(TEXTS)]
    for one in requests:
        stepper.add(one)
    events = [event for _ in requests if stepper.num_waiting() for event in stepper.step()]
    ours = {event.request.index: torch.tensor(np.frombuffer(event.embedding or b"", np.float32)) for event in events}
    model = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    for one in requests:
        with torch.inference_mode():
            hidden = model(input_ids=torch.tensor([one.prompt_ids.tolist()])).last_hidden_state[0]  # type: ignore[attr-defined]
        expected = torch.nn.functional.normalize(hidden.mean(0), dim=0)
        assert float(expected @ ours[one.index]) > 0.99999
        torch.testing.assert_close(ours[one.index], expected, rtol=1e-3, atol=1e-5)


def test_a_checkpoint_with_modules_that_are_not_served_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 9, "max_position_embeddings": 8}')
    (tmp_path / "tokenizer.json").write_text("{}")
    write_modules(tmp_path, "Transformer", "Dense")
    with pytest.raises(CheckpointError, match="Dense"):
        Checkpoint.read(tmp_path)
