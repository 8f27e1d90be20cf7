"""The small units of work that the micro benchmarks and the gate measure, and beside each the bare library.

A case returns functions that do the work once; they run on one thread and need no server. A commit that changes what a
case does gives it a new name, so that the gate does not compare different work.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import itertools
import json
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from ftserve.engine.batcher import ContinuousBatcher
from ftserve.engine.blocks import BlockPool
from ftserve.engine.checkpoint import Checkpoint, resolve
from ftserve.engine.inbox import make_inbox
from ftserve.engine.scheduler import Scheduler, StepPlan
from ftserve.engine.sequence import Sequence
from ftserve.engine.types import GenerationRequest, MediaItem, Modality, SamplingParams, TokenEvent
from ftserve.preprocess.chat import ChatTemplate
from ftserve.preprocess.text import make_detokenizer
from ftserve.preprocess.tokens import load_tokenizer, make_encoder
from ftserve.preprocess.vocabulary import Vocabulary, build_vocabulary
from ftserve.server.bench.workload import prose
from ftserve.server.chat import ChatFormat
from ftserve.server.output import OutputThread
from ftserve.server.reply import Reply
from ftserve.server.wire import ChatRequest, parse

MODEL = "smollm2-135m-instruct"
Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """A unit of work: `prepare` returns the work and its floor, each doing `units` of it a call."""

    prepare: Callable[[], tuple[Work, Work]]
    units: int = 1
    unit: str = "call"
    floor: str = ""  # what the floor does
    holds: bool = False  # whether what the work returns lives on in service, so that its memory counts


@functools.lru_cache(maxsize=1)
def checkpoint() -> Checkpoint:
    return Checkpoint.read(resolve(MODEL))


@functools.lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    return build_vocabulary(load_tokenizer(checkpoint().tokenizer_json))


def texts(count: int, words: int = 150) -> list[str]:
    return list(itertools.islice(prose(random.Random(0), (words, words)), count))


def in_turn(function: Callable[[Any], object], arguments: list[Any]) -> Work:
    """Return a function that calls `function` with the next argument each time."""
    take = itertools.cycle(arguments).__next__
    return lambda: function(take())


def _parse() -> tuple[Work, Work]:
    bodies = [
        json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 9}).encode()
        for text in texts(64)
    ]
    return in_turn(lambda body: parse(ChatRequest, body), bodies), in_turn(json.loads, bodies)


def _template() -> tuple[Work, Work]:
    source = checkpoint().chat_template or ""
    conversations = [[{"role": "user", "content": text}] for text in texts(64)]
    template = ChatTemplate(source, checkpoint().special_tokens)
    bare = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source).render
    return (
        in_turn(template.render, conversations),
        in_turn(lambda messages: bare(messages=messages, add_generation_prompt=True), conversations),
    )


def _tokenize() -> tuple[Work, Work]:
    path = checkpoint().tokenizer_json
    encode, bare = make_encoder(path, use_fastokens=True), load_tokenizer(path).encode
    asked = texts(64)
    return in_turn(lambda text: encode(text, False), asked), in_turn(bare, asked)


def _inbox() -> tuple[Work, Work]:
    from queue import SimpleQueue

    inbox, queue = make_inbox(), SimpleQueue[int]()

    def ours() -> None:
        for k in range(64):
            inbox.put(k)
        inbox.drain()

    def floor() -> None:
        for k in range(64):
            queue.put(k)
        for _ in range(64):
            queue.get_nowait()

    return ours, floor


class NoRunner:
    """Computes nothing."""

    def run(self, plan: StepPlan, _unread: object) -> float:
        """Return at what time the step is done: long ago."""
        return 0.0

    def clear(self, blocks: list[int]) -> None:
        """Nothing to clear."""


def _request(prompt: array[int], max_tokens: int, route: object = None) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return GenerationRequest(request_id="r", index=0, prompt_ids=prompt, sampling=sampling, lane=0, route=route)


def _schedule() -> tuple[Work, Work]:
    from ftserve.engine.simulated import ScriptSampler

    batcher = ContinuousBatcher(
        Scheduler(BlockPool(256 * 40, 16), max_num_seqs=256, max_prefill_tokens=1 << 20),
        NoRunner(),
        ScriptSampler([7]),
        vocab_size=1000,
        max_model_len=600,
        eos_token_ids=frozenset(),
    )
    prompt = array("I", range(200))
    request = _request(prompt, 1)

    def ours() -> object:
        while batcher.num_running() + batcher.num_waiting() < 256:
            batcher.add(_request(prompt, 300))
        return batcher.step()

    return ours, lambda: [TokenEvent(request, (7,)) for _ in range(256)]


def _sample() -> tuple[Work, Work]:
    import torch

    from ftserve.engine.sampler import Sampler

    torch.set_num_threads(1)
    logits = torch.randn(16, 8000)
    sampler = Sampler(8000, torch.device("cpu"))
    sequences = [Sequence(_request(array("I", [k]), 9), arrival=k, max_model_len=99) for k in range(16)]
    return lambda: sampler.sample(logits, sequences).read(), lambda: torch.argmax(logits, -1).tolist()


def _detokenize() -> tuple[Work, Work]:
    from tokenizers.decoders import DecodeStream

    tokenizer = load_tokenizer(checkpoint().tokenizer_json)
    ids = [(token_id,) for text in texts(8) for token_id in tokenizer.encode(text).ids]
    detokenizer, stream = make_detokenizer(vocabulary()), DecodeStream(skip_special_tokens=True)
    window, push, step = ids[:64], detokenizer.push, stream.step

    def ours() -> None:
        for token_ids in window:
            push(token_ids)

    def floor() -> None:
        for token_ids in window:
            step(tokenizer, token_ids[0])

    return ours, floor


class Sink:
    """Stands for a connection that takes everything."""

    request_id = "r"
    is_cancelled = False

    def open_stream(self, headers: object) -> Sink:
        return self

    def send_str(self, text: str) -> None:
        """Take it."""

    def cancel(self) -> None:
        """Nobody does."""


def _stream() -> tuple[Work, Work]:
    output = OutputThread(0)
    batch = []
    for _ in range(64):
        sink: Any = Sink()
        chat_format = ChatFormat("r", MODEL, include_usage=False)
        reply = Reply(
            *(sink, sink, chat_format, vocabulary()), is_streamed=True, include_usage=False, max_bytes=1 << 62
        )
        request = _request(array("I", [1]), 1 << 30, reply)
        reply.expect([request], vocabulary(), 1)
        batch.append(TokenEvent(request, (vocabulary_sample(),)))
    handle = output._handle  # noqa: SLF001 - one round of the thread, without the thread
    handle([batch])  # opens the streams
    send = Sink().send_str

    def floor() -> None:
        for k in range(64):
            send(f'data: {{"id":{k},"choices":[{{"delta":{{"content":"{"word"}"}}}}]}}\n\n')

    return lambda: handle([batch]), floor


def vocabulary_sample() -> int:
    """Return a token that is a whole word."""
    return int(load_tokenizer(checkpoint().tokenizer_json).encode(" word").ids[0])


def _image() -> tuple[Work, Work]:
    import torch
    from PIL import Image

    from ftserve.preprocess.formats import ImageLimits, open_image
    from ftserve.preprocess.images import PatchRules, image_patches
    from ftserve.server.bench.media import jpeg_maker

    torch.set_num_threads(1)
    data = base64.b64decode(jpeg_maker(640, 480, 0)(0).partition(",")[2])
    rules = PatchRules.from_config({"size": {"shortest_edge": 3136, "longest_edge": 12845056}})

    def floor() -> object:
        return Image.open(io.BytesIO(data)).convert("RGB").resize((644, 476), Image.Resampling.BICUBIC).tobytes()

    return lambda: image_patches(open_image(data, ImageLimits()), rules), floor


def _cache_hit() -> tuple[Work, Work]:
    import numpy as np

    from ftserve.preprocess.media import Flight, MediaCache, media_key
    from ftserve.preprocess.sources import read_data_url
    from ftserve.server.bench.media import jpeg_maker

    url, waiter = jpeg_maker(1280, 960, 0)(0), Listener()
    content = url.partition(",")[2]
    cache = MediaCache(1 << 30)

    def claim() -> object:
        return cache.claim(media_key(read_data_url(url, 1 << 26), b"options", b""), waiter)

    flight = claim()
    assert isinstance(flight, Flight)
    item = MediaItem(
        modality=Modality.IMAGE, patches=np.zeros((4, 1176), np.uint8), grid=(1, 2, 2), num_tokens=1, digest=b"d"
    )
    cache.land(flight, item)
    return claim, lambda: hashlib.sha256(base64.b64decode(content)).digest()


class Listener:
    """Wants an item, whatever becomes of it."""

    is_over = False

    def deliver(self, item: MediaItem) -> None:
        """Take it."""

    def fail(self, error: Exception) -> None:
        """Take that too."""


CASES: dict[str, Case] = {
    "parse": Case(_parse, unit="150-word chat", floor="json.loads", holds=True),
    "template": Case(_template, unit="150-word chat", floor="the compiled template", holds=True),
    "tokenize": Case(_tokenize, unit="150 words", floor="tokenizers", holds=True),
    "inbox": Case(_inbox, 64, "item", "queue.SimpleQueue"),
    "schedule": Case(_schedule, 256, "sequence and step", "making the events", holds=True),
    "sample": Case(_sample, 16, "greedy token of 8,000", "torch.argmax"),
    "detokenize": Case(_detokenize, 64, "token", floor="tokenizers' DecodeStream"),
    "stream": Case(_stream, 64, "streamed token", "formatting and sending"),
    "image": Case(_image, unit="640x480 JPEG", floor="Pillow's decode and resize"),
    "cache hit": Case(_cache_hit, unit="1280x960 JPEG", floor="base64 and SHA-256"),
}
