"""Sound for models that hear: samples to a spectrum, by the model's own feature extractor of transformers.

Shared fields: the extractor alone. A call writes to none of its fields, so all threads use one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ftserve.engine.errors import InvalidRequestError, MediaError
from ftserve.engine.types import Feature, MediaItem, Modality
from ftserve.preprocess.audio import F32, AudioFile, AudioLimits
from ftserve.preprocess.sources import MediaSource, Payload

_PIXEL_BYTES = 3  # as the gate counts them
_WORK_COPIES = 12  # of a clip at its full length in float32: padded, Fourier transform, squares, spectrum


class AudioMedia:
    """The sound of one model, behind the intake's interface."""

    def __init__(self, directory: Path, placeholder_id: int, shape: tuple[int, int], limits: AudioLimits) -> None:
        """Load the feature extractor in `directory`; `shape` is [mel bins, frames] of the spectra that the model takes.

        Raises:
            ValueError: there is none, or it makes other spectra than the model takes.
        """
        self._extractor: Any = _load(directory)
        made = (self._extractor.feature_size, self._extractor.nb_max_frames)
        if made != shape:
            raise ValueError(
                f"{directory}: its feature extractor makes spectra of {made[0]} bins and {made[1]} frames, and the "
                f"model takes {shape[0]} and {shape[1]}"
            )
        self.max_bytes = limits.max_bytes
        self.marks: Mapping[Modality, int] = {Modality.AUDIO: placeholder_id}
        # transformers cuts off what the model cannot hear; here nothing that a client sent is dropped in silence.
        self._limits = replace(limits, max_seconds=min(limits.max_seconds, self._extractor.chunk_length))

    def options(self, source: MediaSource) -> bytes:
        """Return all that decides what a clip becomes, beside its bytes: nothing that a request may choose."""
        if source.options:
            raise InvalidRequestError("This model's sound takes no options.", param="mm_processor_kwargs")
        return b"heard"

    def open(self, payload: Payload, _source: MediaSource) -> OpenedSound:
        return OpenedSound(AudioFile(payload[0], self._limits), self)

    @property
    def rate(self) -> int:
        """Samples a second."""
        return int(self._extractor.sampling_rate)

    @property
    def work_bytes(self) -> int:
        """What making a spectrum holds, however short the clip is."""
        return _WORK_COPIES * 4 * int(self._extractor.n_samples)

    def item(self, samples: F32, key: bytes) -> MediaItem:
        """Return the item of mono samples at `rate`. Any thread.

        Raises:
            MediaError: too short to make a token.
        """
        made = self._extractor(
            samples, sampling_rate=self.rate, padding="max_length", return_attention_mask=True, return_tensors="np"
        )
        num_frames = int(made["attention_mask"].sum())
        num_tokens = (num_frames + 1) // 2 // 2  # the tower's second convolution, and its pooling
        if not num_tokens:
            raise MediaError("The audio is too short to be heard.")
        return MediaItem(
            modality=Modality.AUDIO,
            num_tokens=num_tokens,
            digest=key,
            features=(
                Feature("feature_attention_mask", made["attention_mask"]),
                Feature("input_features", made["input_features"]),
            ),
        )


class OpenedSound:
    """A file whose packets have been read."""

    def __init__(self, file: AudioFile, media: AudioMedia) -> None:
        self._file = file
        self._media = media

    @property
    def pixels(self) -> int:
        """What decoding holds, in bytes of the gate's pixels."""
        held = 4 * self._file.seconds * self._media.rate + self._media.work_bytes
        return int(held) // _PIXEL_BYTES

    def decode(self, key: bytes, is_wanted: Callable[[], bool]) -> MediaItem:
        return self._media.item(self._file.samples(self._media.rate, is_wanted), key)


def _load(directory: Path) -> Any:
    """Return the feature extractor in a model's directory.

    Raises:
        ValueError: there is none that makes spectra as Whisper's does, or it cannot be loaded.
    """
    from transformers import AutoFeatureExtractor, WhisperFeatureExtractor

    try:
        extractor = AutoFeatureExtractor.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError, TypeError) as exc:
        raise ValueError(f"{directory}: its feature extractor cannot be loaded: {exc}") from exc
    if not isinstance(extractor, WhisperFeatureExtractor):
        raise ValueError(f"{directory}: feature extractors of type {type(extractor).__name__} are not served")  # noqa: TRY004 - a file is wrong, no argument
    return extractor
