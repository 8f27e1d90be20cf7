"""Prompts that are given as text or as token ids, one or several: OpenAI's `prompt` and `input`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ftserve.engine.errors import InvalidRequestError
from ftserve.preprocess.tokens import ID_TYPECODE
from ftserve.server.generation import GenerationWorker
from ftserve.server.model import ServedModel

Prompt = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


def token_ids_of(prompt: Prompt, worker: GenerationWorker, *, add_special_tokens: bool, param: str) -> list[array[int]]:
    """Return the ids of each prompt in any of the four forms; `param` is the field to blame.

    Raises:
        InvalidRequestError: one is empty, or has an id that the model has not.
    """
    empty = InvalidRequestError(f"The {param} is empty.", param=param)
    if not prompt:
        raise empty
    items: list[str | list[int]] = (
        [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else list(prompt)  # type: ignore[list-item,arg-type]
    )
    prompts = [
        worker.tokenize(item, add_special_tokens=add_special_tokens)
        if isinstance(item, str)
        else array(ID_TYPECODE, item)
        for item in items
    ]
    for ids in prompts:
        if not ids:
            raise empty
        check_ids(ids, worker.model, param=param)
    return prompts


def check_ids(ids: Sequence[int], model: ServedModel, *, param: str) -> None:
    """Raise InvalidRequestError if one of the ids, of which there are some, is none of the model's."""
    if max(ids) >= model.checkpoint.vocab_size:
        raise InvalidRequestError("A token id is outside the model's vocabulary.", param=param)
