"""Sound as a model takes it: what its own processor makes of the same samples, on any number of threads."""

from __future__ import annotations

import threading
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftserve.engine.errors import InvalidRequestError, MediaError, RequestCancelledError
from ftserve.engine.types import MediaItem, Modality
from ftserve.preprocess.audio import AudioLimits
from ftserve.preprocess.hearing import AudioMedia
from ftserve.preprocess.placeholders import expand
from ftserve.preprocess.sources import MediaSource
from tests import hearing
from tests.preprocess.sounds import F32, tone, wav

pytest.importorskip("torch")

MARK = 99
SHAPE = (hearing.TOWER["num_mel_bins"], 2 * hearing.TOWER["max_source_positions"])
SOURCE = MediaSource(modality=Modality.AUDIO, param="messages.0.content.0.input_audio", url="data:,")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extractor")
    hearing.make_extractor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def media(directory: Path) -> AudioMedia:
    return AudioMedia(directory, MARK, SHAPE, AudioLimits())


def heard(media: AudioMedia, samples: F32, rate: int = hearing.RATE) -> MediaItem:
    opened = media.open((wav(samples, rate, as_float=True),), SOURCE)
    assert opened.pixels * 3 > len(samples) * 4
    return opened.decode(b"key", lambda: True)


def arrays(item: MediaItem) -> dict[str, Any]:
    return dict(item.features)


@pytest.mark.parametrize("num_samples", [321, 640, 641, 5000, 16001, 31999, 32000, 32160])
def test_features_and_tokens_equal_the_processors(media: AudioMedia, num_samples: int) -> None:
    from transformers import Qwen2AudioProcessor

    samples = tone(num_samples / hearing.RATE, seed=num_samples)
    item = heard(media, samples)
    made = hearing.make_extractor()(
        samples, sampling_rate=hearing.RATE, padding="max_length", return_attention_mask=True, return_tensors="np"
    )
    assert np.array_equal(arrays(item)["input_features"], made["input_features"])
    assert np.array_equal(arrays(item)["feature_attention_mask"], made["attention_mask"])

    processor: Any = Qwen2AudioProcessor.__new__(Qwen2AudioProcessor)
    processor.feature_extractor, processor.audio_token = hearing.make_extractor(), "<a>"
    _, (replacement,) = processor._process_audio([samples], sampling_rate=hearing.RATE, return_tensors="np")
    ids, (span,) = expand(array("I", [1, MARK, 2]), [item], media.marks)
    assert ids.tolist() == [1, *[MARK] * replacement.count("<a>"), 2]
    assert (span.offset, span.num_tokens) == (1, len(ids) - 2)


def test_one_extractor_serves_all_threads(media: AudioMedia) -> None:
    clips = [tone(0.2 * (k + 1), seed=k) for k in range(8)]
    wanted = [arrays(heard(media, clip)) for clip in clips]
    start = threading.Barrier(8)

    def run(first: int) -> bool:
        start.wait(30)
        order = [(first + k) % 8 for k in range(24)]
        found = [(k, arrays(heard(media, clips[k]))) for k in order]
        return all(np.array_equal(got[name], wanted[k][name]) for k, got in found for name in got)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(8)))


def test_no_more_is_taken_than_the_model_hears(media: AudioMedia, directory: Path) -> None:
    with pytest.raises(InvalidRequestError, match="more than 2 seconds"):
        heard(media, tone(2.5))
    strict = AudioMedia(directory, MARK, SHAPE, AudioLimits(max_seconds=1.0, max_bytes=100_000))
    with pytest.raises(InvalidRequestError, match="more than 1 seconds"):
        heard(strict, tone(1.5))
    with pytest.raises(InvalidRequestError, match="bytes"):
        heard(strict, tone(1.8))
    with pytest.raises(MediaError, match="too short"):
        heard(media, tone(0.01))


def test_options_and_clients_that_leave(media: AudioMedia) -> None:
    asking = MediaSource(modality=Modality.AUDIO, param="p", url="data:,", options=(("rate", 1.0),))
    with pytest.raises(InvalidRequestError, match="no options"):
        media.options(asking)
    opened = media.open((wav(tone(1.0)),), SOURCE)
    with pytest.raises(RequestCancelledError):
        opened.decode(b"key", lambda: False)


def test_a_processor_that_does_not_fit_the_model_is_refused_at_start(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="16 bins and 200 frames"):
        AudioMedia(directory, MARK, (128, 3000), AudioLimits())
    with pytest.raises(ValueError, match="cannot be loaded"):
        AudioMedia(tmp_path, MARK, SHAPE, AudioLimits())
