"""What the requests of a run say."""

from __future__ import annotations

import functools
import json
import pydoc_data.topics
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftserve.server.bench.media import clip_maker, jpeg_maker

KINDS = ("text", "images", "video")
_NUM_PICTURES = 4  # files that are really encoded
_TOKENS_PER_WORD = 1.35  # of English, to guess the length of recorded answers


@dataclass(frozen=True, slots=True)
class Item:
    """One request."""

    kind: str
    path: str
    body: bytes
    cancel_after_s: float | None = None  # the client goes away so long after the start


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    """What to ask for. Ranges are inclusive, and drawn from evenly."""

    model: str
    mix: Mapping[str, float]  # kind: weight
    prompt_words: tuple[int, int] = (150, 150)
    max_tokens: tuple[int, int] = (128, 128)
    stream: bool = True
    images_per_request: int = 1
    image_size: tuple[int, int] = (1280, 960)
    clip_size: tuple[int, int] = (1280, 720)
    clip_s: float = 10.0
    repeat_share: float = 0.0  # of media that were sent before
    cancel_share: float = 0.0
    cancel_within_s: float = 2.0
    ignore_eos: bool = True
    file: Path | None = None  # instead of made-up text: JSON lines, or a list in the form of ShareGPT


def prose(rng: random.Random, words: tuple[int, int]) -> Iterator[str]:
    """Yield numbered excerpts of Python's own manual, which every interpreter carries."""
    text = _manual()
    number = 0
    while True:
        count = rng.randint(*words)
        start = rng.randrange(len(text) - count)
        yield f"{number} " + " ".join(text[start : start + count])
        number += 1


@functools.lru_cache(maxsize=1)
def _manual() -> tuple[str, ...]:
    """Return the words of the manual."""
    return tuple(" ".join(pydoc_data.topics.topics.values()).split())


class Workload:
    """An endless sequence of requests, the same for the same seed."""

    def __init__(self, config: WorkloadConfig, seed: int) -> None:
        """Prepare files and texts.

        Raises:
            ValueError: the file has no request in it, or one that cannot be read; the message names the line.
        """
        self._config = config
        self._rng = random.Random(seed)
        _manual()  # now, not when the first request is due
        self._prose = prose(self._rng, config.prompt_words)
        self._recorded = list(read_requests(config.file)) if config.file is not None else []
        if config.file is not None and not self._recorded:
            raise ValueError(f"{config.file} holds no requests")
        self._media = {kind: self._make_media(kind, seed) for kind in config.mix if kind != "text"}
        self._num_media = self._num_made = seed << 32

    def _make_media(self, kind: str, seed: int) -> list[Callable[[int], str]]:
        config = self._config
        if kind == "images":
            return [jpeg_maker(*config.image_size, seed + k) for k in range(_NUM_PICTURES)]
        return [clip_maker(*config.clip_size, config.clip_s, seed)]

    def __iter__(self) -> Iterator[Item]:
        config, rng = self._config, self._rng
        kinds, weights = list(config.mix), list(config.mix.values())
        while True:
            kind = rng.choices(kinds, weights)[0] if len(kinds) > 1 else kinds[0]
            path, body = self._recorded_body() if self._recorded else ("/v1/chat/completions", self._made_body(kind))
            leaves = rng.random() < config.cancel_share
            yield Item(kind, path, body, rng.uniform(0, config.cancel_within_s) if leaves else None)

    def _made_body(self, kind: str) -> bytes:
        config, text = self._config, next(self._prose)
        if kind == "text":
            return self._encode(
                {"messages": [{"role": "user", "content": text}]}, self._rng.randint(*config.max_tokens)
            )
        count = config.images_per_request if kind == "images" else 1
        part = "image_url" if kind == "images" else "video_url"
        content = [{"type": part, part: {"url": f"\x00{k}"}} for k in range(count)]
        message = {"role": "user", "content": [*content, {"type": "text", "text": text}]}
        body = self._encode({"messages": [message]}, self._rng.randint(*config.max_tokens))
        for k in range(count):  # put in afterwards: escaping megabytes of base64 is wasted work
            body = body.replace(b"\\u0000%d" % k, self._next_url(kind).encode(), 1)
        return body

    def _next_url(self, kind: str) -> str:
        """Return a file that was never sent, or again one that was."""
        makers = self._media[kind]
        first = self._num_made
        if self._num_media > first and self._rng.random() < self._config.repeat_share:
            number = self._rng.randrange(first, self._num_media)
        else:
            number = self._num_media
            self._num_media += 1
        return makers[number % len(makers)](number)

    def _recorded_body(self) -> tuple[str, bytes]:
        fields = dict(self._rng.choice(self._recorded))
        path = "/v1/completions" if "prompt" in fields else "/v1/chat/completions"
        return path, self._encode(fields, fields.pop("max_tokens", None) or self._rng.randint(*self._config.max_tokens))

    def _encode(self, fields: Mapping[str, Any], max_tokens: int) -> bytes:
        config = self._config
        body: dict[str, Any] = {"model": config.model, "temperature": 0, **fields, "max_tokens": max_tokens}
        if config.ignore_eos:
            body["ignore_eos"] = True
        if config.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(body).encode()


def read_requests(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the fields of recorded requests: `messages` or `prompt`, and `max_tokens` where it is known.

    Raises:
        ValueError: a line is not JSON, or has neither.
    """
    text = path.read_text(encoding="utf-8")
    entries: Iterable[Any]
    if text.lstrip().startswith("["):
        entries = json.loads(text)
    else:
        entries = (json.loads(line) for line in text.splitlines() if line.strip())
    for number, entry in enumerate(entries, 1):
        fields = _fields_of(entry)
        if fields is not None:
            yield fields
        elif "conversations" not in entry:  # a conversation that begins with the model's turn is only skipped
            raise ValueError(f"{path}: entry {number} has no messages, prompt or conversations")


def _fields_of(entry: Any) -> dict[str, Any] | None:
    if not isinstance(entry, dict):
        return None
    entry = entry.get("body", entry)
    kept = {name: entry[name] for name in ("messages", "prompt", "max_tokens", "tools") if name in entry}
    if "messages" in kept or "prompt" in kept:
        return kept
    turns = entry.get("conversations") or []
    if len(turns) < 2 or turns[0].get("from") not in ("human", "user"):
        return None
    answer_tokens = max(1, round(_TOKENS_PER_WORD * len(turns[1]["value"].split())))
    return {"messages": [{"role": "user", "content": turns[0]["value"]}], "max_tokens": answer_tokens}
