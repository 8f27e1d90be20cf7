"""Placeholders of images, videos and sound in a prompt: one in the template's text becomes one a token in the ids."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from ftserve.engine.errors import InvalidRequestError
from ftserve.engine.types import MediaItem, MediaSpan, Modality
from ftserve.preprocess.tokens import ID_TYPECODE


def expand(
    prompt: array[int], items: Sequence[MediaItem], token_ids: Mapping[Modality, int]
) -> tuple[array[int], tuple[MediaSpan, ...]]:
    """Return the prompt with the ids of each item in the place of its mark, and where their placeholders begin.

    `token_ids` has the mark of each modality. Items are in the order of the messages, which is that of the template's
    marks.

    Raises:
        InvalidRequestError: the prompt has other placeholders than `items`, so somebody has written them as text.
    """
    modalities = {token_id: modality for modality, token_id in token_ids.items()}
    places = [(k, modalities[token_id]) for k, token_id in enumerate(prompt) if token_id in modalities]
    if [modality for _, modality in places] != [item.modality for item in items]:
        raise InvalidRequestError(
            "The messages contain the model's own placeholder for media, or the chat template does not show each item "
            "where it stands.",
            param="messages",
        )
    expanded, spans, copied = array(ID_TYPECODE), [], 0
    for (place, _), item in zip(places, items, strict=True):
        expanded += prompt[copied:place]
        spans += _spans(item, len(expanded), prompt[place])
        expanded += array(ID_TYPECODE, item.replacement) or prompt[place : place + 1] * item.num_tokens
        copied = place + 1
    expanded += prompt[copied:]
    return expanded, tuple(spans)


def _spans(item: MediaItem, start: int, placeholder: int) -> list[MediaSpan]:
    """Return where an item is whose ids begin at `start`: each step of a clip by itself, if there are times between."""
    ids = item.replacement
    if item.modality is not Modality.VIDEO or not ids:
        return [MediaSpan(item, start + item.lead)]
    begins = [k for k, found in enumerate(ids) if found == placeholder and (k == 0 or ids[k - 1] != placeholder)]
    return [MediaSpan(item, start + begin, step) for step, begin in enumerate(begins)]
