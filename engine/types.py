"""What crosses the border of the engine: a request in, token events out.

Ownership: the thread that submits a `GenerationRequest` gives it away; the engine thread hands it back inside
each `TokenEvent`. Neither side mutates what it has handed over, with one exception that is part of the hand-over:
the engine thread writes the engine's stamps of `RequestTimes` before it emits the first and the last event.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ftserve.engine.grammar import Grammar


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"  # end-of-sequence or stop token, or a stop string
    LENGTH = "length"  # max_tokens, or the model's length
    CANCELLED = "cancelled"  # by `EngineClient.cancel`
    ERROR = "error"  # `TokenEvent.error` says why


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Ranges are checked at the wire; defaults mean "off"."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    stop: tuple[str, ...] = ()  # matched by the output threads, which then cancel the sequence
    include_stop: bool = False  # whether the text keeps the stop string that ended it
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] = ()  # no others may be chosen; empty allows all
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that the output may not hold
    num_logprobs: int | None = None  # 0: of the chosen token only; None: of none
    num_prompt_logprobs: int | None = None  # the same for the tokens of the prompt
    grammar: Grammar | None = None  # what the output has to look like; its end ends the sequence, `ignore_eos` or not
    grammar_after: tuple[int, ...] = ()  # the grammar begins behind this sequence of output tokens; empty: at once


@dataclass(slots=True)
class RequestTimes:
    """`time.monotonic()` stamps of one request, in seconds; 0.0 means "not reached".

    Each field has one writer, and each reader comes after it in the request's path (HTTP thread, preprocess
    thread, engine thread, output thread), so the hand-over from thread to thread orders every access.
    """

    arrival: float = 0.0  # HTTP thread: the request's head was read
    body_read: float = 0.0  # HTTP thread: the body is whole
    preprocess_start: float = 0.0  # preprocess thread: taken from the pool's queue
    validated: float = 0.0  # preprocess thread
    templated: float = 0.0  # preprocess thread
    tokenized: float = 0.0  # preprocess thread
    media_ready: float = 0.0  # preprocess thread: images, videos and sound are decoded
    submitted: float = 0.0  # preprocess thread: pushed into the engine's inbox
    admitted: float = 0.0  # engine thread: taken from the inbox
    scheduled: float = 0.0  # engine thread: first step that works on it
    first_token: float = 0.0  # engine thread
    finished: float = 0.0  # engine thread


class Modality(enum.Enum):
    """What a media item was before it became patches or features."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


class Feature(NamedTuple):
    """One input of a model's tower, as its processor makes it for one image or one clip of sound."""

    name: str
    values: NDArray[np.generic]  # of a type in `codec.DTYPES`


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MediaItem:
    """One image, video or clip of sound as a model takes it.

    For the Qwen-VL family that is `patches`, not normalized, which is left to the device; for other families it is
    `features`. One object is shared by the cache and by every request that shows it, on any thread; nobody writes to
    its arrays.
    """

    modality: Modality
    num_tokens: int  # of the prompt, from the first placeholder to the last; of a clip, over its steps
    digest: bytes  # equal only for equal content and equal salt: the identity in the caches
    patches: NDArray[np.uint8] | None = None  # [t * h * w, channels * frames * size * size], in the order of merging
    grid: tuple[int, int, int] = (1, 1, 1)  # (t, h, w) in patches, as in `image_grid_thw`
    second_per_grid: float | None = None  # video: seconds of the clip per step of t
    features: tuple[Feature, ...] = ()
    replacement: Sequence[int] = ()  # ids in place of its mark in the prompt; empty: `num_tokens` placeholders
    lead: int = 0  # how many of these come before the first placeholder

    @property
    def own_patches(self) -> NDArray[np.uint8]:
        """Return the patches of an item that has them."""
        assert self.patches is not None, "it is of another family"
        return self.patches

    @property
    def nbytes(self) -> int:
        arrays = [feature.values for feature in self.features]
        return sum(array.nbytes for array in (arrays if self.patches is None else [self.patches, *arrays]))


@dataclass(frozen=True, slots=True, eq=False)
class MediaSpan:
    """Where a prompt shows an item, or one step of it: consecutive placeholder ids.

    Models that write the time before each step of a clip (Qwen3-VL) have a span a step; others one span an item.
    """

    item: MediaItem
    offset: int  # of its first placeholder in `prompt_ids`
    step: int | None = None  # of the item's t; None: all of them

    @property
    def num_tokens(self) -> int:
        return self.item.num_tokens if self.step is None else self.item.num_tokens // self.item.grid[0]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GenerationRequest:
    """One sequence to generate. Compared by identity; an HTTP request with n choices submits n of these."""

    request_id: str
    index: int  # which choice of the HTTP request this is
    prompt_ids: Sequence[int]  # token ids, each 0 <= id < vocabulary size; an `array` where it can be long
    sampling: SamplingParams
    media: tuple[MediaSpan, ...] = ()  # in the order of the prompt, not overlapping
    lane: int  # the output thread that receives this request's events
    route: object  # opaque to the engine: the receiver's own state
    deadline: float | None = None  # time.monotonic() seconds
    priority: int = 0  # smaller is sooner
    replica: int = 0  # the engine that computes it, see `EngineRouter.place`
    cache_salt: bytes = b""  # separates tenants in the prefix cache
    times: RequestTimes = field(default_factory=RequestTimes)

    def is_expired(self, now: float | None = None) -> bool:
        return self.deadline is not None and (time.monotonic() if now is None else now) >= self.deadline


class TokenLogprobs(NamedTuple):
    """How likely a token was: from the float32 log-softmax of the model's own logits, before anything adjusts them."""

    token_id: int
    logprob: float
    rank: int  # 1 for the likeliest
    top_ids: Sequence[int]  # the likeliest tokens, in descending order; as many as were asked for
    top_logprobs: Sequence[float]


@dataclass(slots=True, eq=False)
class TokenEvent:
    """News of one sequence from one step: tokens, and at its end exactly one finish reason.

    Made by the engine thread and owned by the output thread from then on; not frozen because a frozen
    dataclass costs three times as much to make, and one is made per token.
    """

    request: GenerationRequest
    token_ids: Sequence[int]  # new tokens, in order; may be empty in a final event
    finish_reason: FinishReason | None = None  # set on the last event of a sequence, and only there
    stop_token_id: int | None = None  # the token in `token_ids[-1]` that ended it; it is not part of the text
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache saved; set on the first event
    error: Exception | None = None  # with FinishReason.ERROR; an FtserveError when it may be shown
    logprobs: Sequence[TokenLogprobs] | None = None  # one for each of `token_ids`, if asked for
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None  # on the first event; the first token has None
    embedding: bytes | None = None  # [size] of float32; on the only event of a request to an embedding model


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one HTTP request, summed over its choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0  # of the completion's
