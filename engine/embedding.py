"""The engine of models that make a vector of a text: batch, run, pool. Engine thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel
from transformers.utils import logging as transformers_logging

from ftserve.engine import loader
from ftserve.engine.checkpoint import Checkpoint
from ftserve.engine.config import EngineConfig
from ftserve.engine.errors import EngineRequestError, InvalidRequestError, RequestTooLongError
from ftserve.engine.pooling import Pooling, PoolingKind
from ftserve.engine.runner import is_out_of_memory
from ftserve.engine.torch_stepper import default_threads
from ftserve.engine.types import FinishReason, GenerationRequest, TokenEvent

log = logging.getLogger("ftserve.engine")


class EmbeddingStepper:
    """A `Stepper` that answers each request with one event, which holds its vector.

    A step takes requests in the order of (priority, arrival), padded to the longest, while they fit the budget of
    tokens; what does not fit beside the first lets shorter ones pass, and is the first itself soon.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pooling: Pooling,
        *,
        vocab_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._model = model
        self._pooling = pooling
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_num_batched_tokens
        self._waiting: dict[GenerationRequest, None] = {}  # in the order of arrival
        self._device_s = 0.0

    def add(self, request: GenerationRequest) -> None:
        prompt = request.prompt_ids
        if not prompt:
            raise InvalidRequestError("The input has no tokens.", param="input")
        if len(prompt) > self._max_model_len:
            raise RequestTooLongError(
                f"The input has {len(prompt)} tokens; the model holds {self._max_model_len}.", param="input"
            )
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            raise InvalidRequestError(f"A token id is not in 0 to {self._vocab_size - 1}.", param="input")
        self._waiting[request] = None

    def cancel(self, request: GenerationRequest) -> None:
        del self._waiting[request]

    def step(self) -> list[TokenEvent]:
        batch = self._take()
        now = time.monotonic()
        for request in batch:
            request.times.scheduled = request.times.scheduled or now
        try:
            vectors = embed(self._model, [request.prompt_ids for request in batch], self._pooling)
        except RuntimeError as exc:
            if not is_out_of_memory(exc):
                raise
            return [self._fail(request, exc) for request in batch]
        finally:
            self._device_s += time.monotonic() - now
        events = []
        for request, vector in zip(batch, vectors.numpy(), strict=True):
            request.times.first_token = request.times.finished = time.monotonic()
            events.append(TokenEvent(request, (), FinishReason.STOP, embedding=vector.tobytes()))
        return events

    def num_running(self) -> int:
        return 0  # between steps nothing is on the device

    def num_waiting(self) -> int:
        return len(self._waiting)

    def kv_usage(self) -> float:
        return 0.0

    def device_seconds(self) -> float:
        return self._device_s

    def describe(self) -> dict[str, str]:
        dtype = str(self._model.dtype).removeprefix("torch.")
        return {"device": str(self._model.device), "dtype": dtype, "kv_capacity_tokens": "0"}

    def close(self) -> None:
        self._waiting.clear()

    def _take(self) -> list[GenerationRequest]:
        """Take the requests of one step."""
        batch: list[GenerationRequest] = []
        longest = 0
        for request in sorted(self._waiting, key=lambda request: request.priority):  # stable: arrival decides the rest
            width = max(longest, len(request.prompt_ids))
            if not batch or width * (len(batch) + 1) <= self._max_tokens:
                batch.append(request)
                longest = width
            if len(batch) == self._max_num_seqs:
                break
        for request in batch:
            del self._waiting[request]
        return batch

    def _fail(self, request: GenerationRequest, cause: Exception) -> TokenEvent:
        error = EngineRequestError("The device has not enough memory for this input.")
        error.__cause__ = cause
        request.times.finished = time.monotonic()
        return TokenEvent(request, (), FinishReason.ERROR, error=error)


def make_embedding_stepper(config: EngineConfig, checkpoint: Checkpoint) -> EmbeddingStepper:
    """Load the model; takes seconds. Use the stepper on the thread that made it.

    Raises:
        UnsupportedModelError: transformers cannot load it.
    """
    torch.set_num_threads(config.torch_threads or default_threads())
    device = loader.choose_device(config.device)
    dtype = loader.choose_dtype(config.dtype, checkpoint.path, device)
    assert config.max_model_len is not None, "resolved"
    return EmbeddingStepper(
        _load(checkpoint.path, device, dtype),
        checkpoint.pooling or Pooling(PoolingKind.LAST if checkpoint.is_generating else PoolingKind.MEAN),
        vocab_size=checkpoint.vocab_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )


def _load(path: Path, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    transformers_logging.disable_progress_bar()  # once, at start: the log has its own line
    try:
        model = AutoModel.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", local_files_only=True)
    except (ValueError, KeyError, ImportError) as exc:
        raise loader.UnsupportedModelError(f"{path}: transformers cannot load this model: {exc}") from exc
    return model.to(device).eval().requires_grad_(False)  # type: ignore[no-any-return]


@torch.inference_mode()
def embed(model: PreTrainedModel, texts: Sequence[Sequence[int]], pooling: Pooling) -> Tensor:
    """Return the vectors of token sequences, float32 [texts, hidden size] on the CPU."""
    lengths = torch.tensor([len(text) for text in texts])
    width = int(lengths.max())
    ids = torch.zeros(len(texts), width, dtype=torch.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.int64)
    mask = torch.arange(width) < lengths[:, None]
    output = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device, torch.int64))
    hidden = output.last_hidden_state.float().cpu()
    vectors = pool(hidden, mask, pooling.kind)
    return torch.nn.functional.normalize(vectors) if pooling.normalize else vectors


def pool(hidden: Tensor, mask: Tensor, kind: PoolingKind) -> Tensor:
    """Reduce hidden states [texts, tokens, size] to [texts, size]; `mask` is true where there are tokens."""
    match kind:
        case PoolingKind.CLS:
            return hidden[:, 0]
        case PoolingKind.LAST:
            return hidden[torch.arange(len(hidden)), mask.sum(1) - 1]
        case PoolingKind.MAX:
            return hidden.masked_fill(~mask[..., None], -torch.inf).amax(1)
        case PoolingKind.MEAN:
            return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
