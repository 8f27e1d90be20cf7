"""Images and clips of a request as the scheduler sees them: units that the vision tower takes at once. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from ftserve.engine.types import GenerationRequest, MediaItem

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class MediaUnit:
    """An image or one step of a clip, and where its embeddings go in a sequence.

    Vision towers of the Qwen-VL family let no step of a clip see another, so each can be encoded by itself.
    """

    name: bytes  # equal for equal content only
    start: int  # of its placeholders in the sequence
    end: int
    item: MediaItem
    step: int  # of the item's t

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, eq=False)
class PromptMedia:
    """What a sequence has to know of its request's media."""

    units: tuple[MediaUnit, ...]  # ascending, not overlapping
    positions: NDArray[np.int64] | None = None  # [axes, prompt length]; None: each token's own index
    position_delta: int = 0  # what a generated token's position is more than its index


class MediaPreparer(Protocol):
    """What makes a request's media ready, before it is queued."""

    def prepare(self, request: GenerationRequest) -> PromptMedia:
        """Check and split what the request shows.

        Raises:
            InvalidRequestError: the model cannot take it.
        """


class UncheckedMedia:
    """Takes everything, for engines that look at no pixel."""

    def prepare(self, request: GenerationRequest) -> PromptMedia:
        return PromptMedia(split_media(request))


def split_media(request: GenerationRequest) -> tuple[MediaUnit, ...]:
    """Return the units of the request's spans."""
    units = []
    for span in request.media:
        item, start = span.item, span.offset
        steps = range(item.grid[0]) if span.step is None else (span.step,)
        tokens = item.num_tokens // item.grid[0]
        identity = repr((item.digest, item.grid, item.second_per_grid)).encode()
        for step in steps:
            name = blake2b(identity + step.to_bytes(4), digest_size=16).digest()
            units.append(MediaUnit(name, start, start + tokens, item, step))
            start += tokens
    return tuple(units)
