"""Images, videos and sound of chat requests: what connects the wire, the intake and the prompt."""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from ftserve.engine.checkpoint import FEATURE_FAMILIES, PATCH_FAMILIES, Checkpoint
from ftserve.engine.threads import name_this_thread
from ftserve.engine.types import MediaSpan, Modality
from ftserve.preprocess.audio import AudioLimits
from ftserve.preprocess.chat import shows_parts
from ftserve.preprocess.fetch import FetchRules, HttpFetcher
from ftserve.preprocess.formats import ImageLimits
from ftserve.preprocess.gate import PixelGate
from ftserve.preprocess.gathering import Gathering
from ftserve.preprocess.hearing import AudioMedia
from ftserve.preprocess.intake import MediaHandler, MediaIntake, Observe
from ftserve.preprocess.media import MediaCache
from ftserve.preprocess.placeholders import expand
from ftserve.preprocess.processed import ProcessedMedia
from ftserve.preprocess.qwen import QwenMedia
from ftserve.preprocess.sources import LocalFiles
from ftserve.preprocess.video import VideoLimits
from ftserve.server.config import MediaConfig
from ftserve.server.exchange import Exchange
from ftserve.server.metrics import Recorder
from ftserve.server.parts import PartRules, media_options, split_parts
from ftserve.server.wire import ChatRequest

log = logging.getLogger("ftserve.server")

# What is short goes first where cores are few: texts, answers, the engine's own work. With niceness 5 for decoding, a
# text waited for tens of milliseconds on two cores full of images; with 19 it hardly noticed.
NICENESS = {"fetch": 5, "open": 5, "decode": 19}
LARGE_BODY_BYTES = 256 << 10  # parsing it would hold up the texts behind it

_MIN_TOKENS = {"mistral3": 2}  # of an image; transformers' code fails on one of a single token

Readers = Mapping[str, tuple[str, Callable[[], float]]]


class MediaFront:
    """The media of a server whose model takes some. Nothing of it changes once it is made, but for the intake."""

    def __init__(
        self, intake: MediaIntake, rules: PartRules, marks: Mapping[Modality, int], recorders: Sequence[Recorder]
    ) -> None:
        self.intake = intake
        self.recorders = recorders  # of the intake's threads
        self._rules = rules
        self._marks = marks  # the token by which the template shows an item

    def take(self, fields: ChatRequest, exchange: Exchange) -> tuple[list[dict[str, Any]], Gathering | None]:
        """Return the messages for the template, and the media in them on their way; None if there are none.

        Raises:
            InvalidRequestError: a part is malformed, or not for this model.
        """
        options = media_options(fields.mm_processor_kwargs, fields.media_io_kwargs)
        messages, sources = split_parts(fields.messages, self._rules, options)
        if not sources:
            return messages, None
        gathering = self.intake.gather(sources, fields.salt())
        exchange.on_cancel(gathering.cancel)
        return messages, gathering

    def show(self, prompt: array[int], gathering: Gathering) -> tuple[array[int], tuple[MediaSpan, ...]]:
        """Return the prompt with room for what was gathered, and where it is.

        Raises:
            FtserveError: why there is nothing to show.
        """
        return expand(prompt, gathering.found(), self._marks)

    def gauges(self) -> Readers:
        cache, gate = self.intake.cache.statistics, self.intake.gate.statistics
        return {
            "mm_cache_bytes": ("Bytes of decoded media in the cache", lambda: cache().num_bytes),
            "mm_cache_items": ("Decoded media in the cache", lambda: cache().num_items),
            "mm_in_flight": ("Media that are decoded or wait for it", lambda: cache().num_in_flight),
            "mm_pixels_decoding": ("Pixels of media that are being decoded", lambda: gate().pixels_inside),
            "mm_pixels_waiting": ("Pixels of media that wait for room", lambda: gate().pixels_waiting),
            "mm_fetching": ("URLs that are being fetched", self.intake.num_fetching),
            "mm_queue_depth": ("Media that wait for a thread", self.intake.depth),
        }

    def counters(self) -> Readers:
        cache, gate = self.intake.cache.statistics, self.intake.gate.statistics
        return {
            "mm_cache_hits": ("Media found in the cache", lambda: cache().hits),
            "mm_cache_joined": ("Media that waited for another request's decode", lambda: cache().joined),
            "mm_cache_misses": ("Media that had to be decoded", lambda: cache().misses),
            "mm_cache_evictions": ("Media that made room", lambda: cache().evictions),
            "mm_decodes": ("Media that were decoded", lambda: cache().decoded),
            "mm_refused": ("Media refused because too much waited", lambda: gate().refused),
        }


def make_media(config: MediaConfig, checkpoint: Checkpoint, *, num_threads: int) -> MediaFront | None:
    """Wire the media path, not started; None if the model takes text only.

    Raises:
        ValueError: the model's processor is configured in a way that we do not reproduce.
    """
    if checkpoint.media_inputs is None or checkpoint.chat_template is None:
        return None
    handler = _handler(config, checkpoint)
    if handler is None:
        log.warning("models of type %s are served without images", checkpoint.model_type)
        return None
    rules = FetchRules(domains=config.allowed_domains, max_bytes=handler.max_bytes, timeout_s=config.fetch_timeout_s)
    recorders = {role: [Recorder() for _ in range(num_threads)] for role in ("open", "decode")}
    recorders["fetch"] = [Recorder()]

    def on_thread(role: str, number: int) -> Observe:
        native_id = name_this_thread(f"ft-{role}-{number}")
        os.setpriority(os.PRIO_PROCESS, native_id, NICENESS[role])  # of the thread alone, on Linux
        return recorders[role][number].observe_stage

    intake = MediaIntake(
        handler,
        MediaCache(int(config.cache_gb * 2**30)),
        PixelGate(int(config.decoding_megapixels * 1e6), int(config.waiting_megapixels * 1e6)),
        files=LocalFiles(config.allowed_local_path),
        fetcher=HttpFetcher(rules, lambda: on_thread("fetch", 0)),
        num_threads=num_threads,
        on_thread=on_thread,
    )
    marks = dict(handler.marks)
    return MediaFront(intake, _part_rules(config, checkpoint, marks), marks, [*chain(*recorders.values())])


def _handler(config: MediaConfig, checkpoint: Checkpoint) -> MediaHandler | None:
    """Return what makes a family's inputs of media; None for a family whose media are not served."""
    max_bytes, vision = int(config.max_file_mb * 2**20), checkpoint.vision
    if (audio := checkpoint.audio) is not None:
        audio_limits = AudioLimits(max_bytes=max_bytes, max_seconds=config.max_audio_seconds)
        shape = (audio.num_mel_bins, audio.num_frames)
        return AudioMedia(checkpoint.path, audio.audio_token_id, shape, audio_limits)
    assert vision is not None, "it has one or the other"
    limits = ImageLimits(max_bytes=max_bytes, max_pixels=int(config.max_megapixels * 1e6))
    if checkpoint.model_type in FEATURE_FAMILIES:
        min_tokens = _MIN_TOKENS.get(checkpoint.model_type, 1)
        return ProcessedMedia(checkpoint.path, vision.image_token_id, limits, min_tokens=min_tokens)
    if checkpoint.model_type not in PATCH_FAMILIES:
        return None
    marks = {Modality.IMAGE: vision.image_token_id}
    if vision.video_token_id is not None:
        marks[Modality.VIDEO] = vision.video_token_id
    video_limits = VideoLimits(
        max_bytes=max_bytes, max_frames=config.max_video_frames, max_seconds=config.max_video_seconds
    )
    return QwenMedia.read(checkpoint.path, checkpoint.model_type, marks, limits, video_limits)


def _part_rules(config: MediaConfig, checkpoint: Checkpoint, marks: Mapping[Modality, int]) -> PartRules:
    from tokenizers import Tokenizer

    token_of = Tokenizer.from_file(str(checkpoint.tokenizer_json)).id_to_token
    most = {Modality.IMAGE: config.max_images, Modality.VIDEO: config.max_videos, Modality.AUDIO: config.max_audios}
    return PartRules(
        max_items={modality: most[modality] for modality in marks},
        shows_parts=shows_parts(checkpoint.chat_template or ""),
        marks={modality: token_of(token_id) or "" for modality, token_id in marks.items()},
    )
