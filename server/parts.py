"""Content parts of chat messages: text stays, media become sources for the intake and marks for the template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ftserve.engine.errors import InvalidRequestError
from ftserve.engine.types import Modality
from ftserve.preprocess.sources import MediaSource
from ftserve.server.wire import Message

MAX_UUID_CHARS = 256

_KINDS = {
    "image_url": Modality.IMAGE,
    "video_url": Modality.VIDEO,
    "audio_url": Modality.AUDIO,
    "input_audio": Modality.AUDIO,
}
_SHOWN: dict[Modality, dict[str, str]] = {  # to the template: some of those for sound look at keys, and at no type
    Modality.IMAGE: {"type": "image"},
    Modality.VIDEO: {"type": "video"},
    Modality.AUDIO: {"type": "audio", "audio_url": ""},
}
_OPTIONS = {  # what a request may ask of the processing, by modality
    Modality.IMAGE: ("min_pixels", "max_pixels"),
    Modality.VIDEO: ("min_pixels", "max_pixels", "fps", "num_frames", "min_frames", "max_frames"),
}

Options = Mapping[Modality, tuple[tuple[str, float], ...]]


@dataclass(frozen=True, slots=True)
class PartRules:
    """How the served model takes parts."""

    max_items: Mapping[Modality, int]  # in one prompt; a modality that is not here is not taken
    shows_parts: bool  # the template goes through the parts; else it gets one text
    marks: Mapping[Modality, str]  # what stands for an item in such a text


def split_parts(
    messages: Sequence[Message], rules: PartRules, options: Options
) -> tuple[list[dict[str, Any]], list[MediaSource]]:
    """Return the messages as the template takes them, and the media in the order in which they stand.

    Raises:
        InvalidRequestError: a part is malformed or not for this model, or there are too many.
    """
    sources: list[MediaSource] = []
    plain = [_message(message, f"messages.{k}", rules, options, sources) for k, message in enumerate(messages)]
    for modality, most in rules.max_items.items():
        if sum(source.modality is modality for source in sources) > most:
            raise InvalidRequestError(f"More than {most} {modality.value} parts in one prompt.", param="messages")
    return plain, _resolve_siblings(sources)


def _message(
    message: Message, where: str, rules: PartRules, options: Options, sources: list[MediaSource]
) -> dict[str, Any]:
    if "role" not in message:
        raise InvalidRequestError("A message has no 'role'.", param=f"{where}.role")
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = [_part(part, f"{where}.content.{k}", rules, options, sources) for k, part in enumerate(content)]
    if rules.shows_parts:
        return {**message, "content": parts}
    texts = [part["text"] if part["type"] == "text" else rules.marks[Modality(part["type"])] for part in parts]
    return {**message, "content": "\n".join(texts)}


def _part(
    part: dict[str, Any], where: str, rules: PartRules, options: Options, sources: list[MediaSource]
) -> dict[str, str]:
    kind = part.get("type")
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequestError("A text part needs a string 'text'.", param=f"{where}.text")
        return {"type": "text", "text": text}
    modality = _KINDS.get(kind) if isinstance(kind, str) else None
    if modality is None or modality not in rules.max_items:
        raise InvalidRequestError(
            f"This model takes no content parts of type {str(kind)[:40]!r}.", param=f"{where}.type"
        )
    assert isinstance(kind, str), "it is in _KINDS"
    sources.append(
        MediaSource(
            modality=modality,
            param=f"{where}.{kind}",
            url=_sound(part, where) if kind == "input_audio" else _url(part, kind, where),
            uuid=_uuid(part, where),
            options=options.get(modality, ()),
        )
    )
    return dict(_SHOWN[modality])


def _url(part: dict[str, Any], kind: str, where: str) -> str:
    """Return the part's URL, or "" for one that refers to a cached item by its uuid."""
    value = part.get(kind)
    url = value.get("url") if isinstance(value, dict) else value
    if isinstance(url, str) and url:
        return url
    if url is None and part.get("uuid") is not None:
        return ""
    raise InvalidRequestError(f"A part of type '{kind}' needs a string 'url'.", param=f"{where}.{kind}.url")


def _sound(part: dict[str, Any], where: str) -> str:
    """Return the data of OpenAI's `input_audio` as a URL, or "" as `_url` does.

    What the data is shows in itself, so the format that it is said to have decides nothing.
    """
    value = part.get("input_audio")
    if value is None and part.get("uuid") is not None:
        return ""
    data, form = (value.get("data"), value.get("format", "")) if isinstance(value, dict) else (None, "")
    if not isinstance(data, str) or not data:
        raise InvalidRequestError(
            "A part of type 'input_audio' needs 'data' in base64.", param=f"{where}.input_audio.data"
        )
    if not isinstance(form, str):
        raise InvalidRequestError("'format' must be a string.", param=f"{where}.input_audio.format")
    return f"data:;base64,{data}"


def _uuid(part: dict[str, Any], where: str) -> str | None:
    uuid = part.get("uuid")
    if uuid is None or (isinstance(uuid, str) and 0 < len(uuid) <= MAX_UUID_CHARS):
        return uuid
    raise InvalidRequestError(f"'uuid' must be a string of 1 to {MAX_UUID_CHARS} characters.", param=f"{where}.uuid")


def _resolve_siblings(sources: list[MediaSource]) -> list[MediaSource]:
    """Let a bare uuid refer to a part of the same request that brings the data."""
    urls = {(source.modality, source.uuid): source.url for source in sources if source.url}
    return [
        source if source.url else replace(source, url=urls.get((source.modality, source.uuid), ""))
        for source in sources
    ]


def media_options(processor: dict[str, Any] | None, loading: dict[str, Any] | None) -> Options:
    """Turn `mm_processor_kwargs` and `media_io_kwargs` into options by modality.

    Raises:
        InvalidRequestError: a key that is not known, or a value that is no positive number.
    """
    if not processor and not loading:
        return {}
    asked: dict[Modality, dict[str, float]] = {modality: {} for modality in _OPTIONS}
    for key, value in (processor or {}).items():
        fitting = [modality for modality, keys in _OPTIONS.items() if key in keys]
        if not fitting:
            raise InvalidRequestError(f"'{key[:40]}' is not known here.", param="mm_processor_kwargs")
        for modality in fitting:
            asked[modality][key] = _positive(value, f"mm_processor_kwargs.{key}")
    for kind, values in (loading or {}).items():
        known = next((keys for modality, keys in _OPTIONS.items() if modality.value == kind), ())
        if not known or not values.keys() <= set(known):
            raise InvalidRequestError("'media_io_kwargs' has a key that is not known here.", param="media_io_kwargs")
        for key, value in values.items():
            asked[Modality(kind)][key] = _positive(value, f"media_io_kwargs.{kind}.{key}")
    return {modality: tuple(sorted(values.items())) for modality, values in asked.items() if values}


def _positive(value: object, param: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 2**31:
        raise InvalidRequestError(f"'{param[:80]}' must be a positive number.", param=param[:80])
    return value
