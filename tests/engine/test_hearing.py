"""Models that hear, in the engine: what they say of sound is what transformers says of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from ftserve.engine.checkpoint import AudioInputs
from ftserve.engine.errors import EngineRequestError, InvalidRequestError
from ftserve.engine.types import Feature, FinishReason, MediaItem, MediaSpan, Modality
from tests import hearing
from tests.engine.seeing import VOCAB_SIZE, Prompt, TinySeeing

pytestmark = pytest.mark.usefixtures("queueing")

AUDIO = 100  # the placeholder
NUM_FRAMES = 2 * hearing.TOWER["max_source_positions"]


def sound(seed: int, num_frames: int) -> MediaItem:
    """Return a clip whose spectrum is noise, with `num_frames` frames that are no silence."""
    noise = np.random.default_rng(seed)
    spectrum = noise.normal(size=(1, hearing.TOWER["num_mel_bins"], NUM_FRAMES)).astype(np.float32)
    mask = (np.arange(NUM_FRAMES) < num_frames).astype(np.int32)[None]
    return MediaItem(
        modality=Modality.AUDIO,
        features=(Feature("feature_attention_mask", mask), Feature("input_features", spectrum)),
        num_tokens=(num_frames + 1) // 2 // 2,
        digest=noise.bytes(16),
    )


class HeardPrompt(Prompt):
    """Token ids with sound in them."""

    def show(self, item: MediaItem) -> Prompt:
        self.media.append(MediaSpan(item, len(self.ids)))
        self.ids += [AUDIO] * item.num_tokens
        return self

    def inputs(self) -> dict[str, Any]:
        import torch

        ids = torch.tensor([self.ids])
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        for place, name in enumerate(("feature_attention_mask", "input_features")):
            if self.media:
                arrays = [span.item.features[place].values for span in self.media]
                inputs[name] = torch.from_numpy(np.concatenate(arrays))
        return inputs


class TinyHearing(TinySeeing):
    inputs = AudioInputs(audio_token_id=AUDIO, num_mel_bins=hearing.TOWER["num_mel_bins"], num_frames=NUM_FRAMES)

    def __init__(self) -> None:
        import torch

        torch.manual_seed(0)
        self._make(hearing.make_config(VOCAB_SIZE, AUDIO))

    def prompt(self) -> Prompt:
        return HeardPrompt("")


@pytest.fixture(scope="session")
def hears(torch: Any) -> TinyHearing:
    return TinyHearing()


@pytest.fixture
def album(hears: TinyHearing) -> list[Prompt]:
    """Prompts with one clip, several of them, and none."""
    short, odd, whole = sound(1, 21), sound(2, 62), sound(3, NUM_FRAMES)
    return [
        hears.prompt().say(5, 6).show(short).say(7, 8, 9),
        hears.prompt().show(odd).say(4).show(short).say(3, 9, 11).show(odd).say(2),
        hears.prompt().say(20, 21).show(whole).say(22),
        hears.prompt().say(1, 40, 41, 42, 43),
    ]


def ask(make_request: Any, prompt: Prompt, max_tokens: int = 12) -> Any:
    return make_request(prompt.ids, max_tokens, media=prompt.media)


@pytest.mark.parametrize("chunk", [1, 7, 64, 300])
def test_greedy_equals_transformers_wherever_chunks_cut_sound(
    hears: TinyHearing, album: list[Prompt], make_request: Any, texts: Any, chunk: int
) -> None:
    batcher = hears.batcher(chunk=chunk)
    for _ in ("cold", "warm"):
        got = texts(batcher, [ask(make_request, prompt) for prompt in album])
        assert got == [hears.greedy(prompt, 12) for prompt in album]


@pytest.mark.parametrize("use_prefix_cache", [False, True])
def test_greedy_equals_transformers_under_preemption_with_little_memory_for_embeddings(
    hears: TinyHearing, album: list[Prompt], make_request: Any, texts: Any, use_prefix_cache: bool
) -> None:
    batcher = hears.batcher(
        num_blocks=30, chunk=9, use_prefix_cache=use_prefix_cache, encoder_bytes=50 * 4 * hearing.HIDDEN_SIZE
    )
    got = texts(batcher, [ask(make_request, prompt, 24) for prompt in album])
    assert got == [hears.greedy(prompt, 24) for prompt in album]
    assert batcher.statistics().num_preemptions > 0
    assert batcher.statistics().encoder.evictions > 0
    assert batcher.statistics().encoder.held_tokens <= 50


def test_a_clip_is_encoded_once_for_all_who_show_it(hears: TinyHearing, make_request: Any, texts: Any) -> None:
    clip = sound(4, 40)
    asked = [hears.prompt().say(number).show(clip).say(9) for number in range(10, 16)]
    batcher = hears.batcher()
    assert texts(batcher, [ask(make_request, p) for p in asked]) == [hears.greedy(p, 12) for p in asked]
    assert batcher.statistics().encoder.encoded == 1


def test_other_sound_behind_the_same_placeholders_is_another_prefix(
    hears: TinyHearing, make_request: Any, texts: Any
) -> None:
    batcher = hears.batcher()
    for seed in (5, 6):
        prompt = hears.prompt().say(1).show(sound(seed, 80)).say(2, 3, 4)
        assert texts(batcher, [ask(make_request, prompt)]) == [hears.greedy(prompt, 12)]


def test_sound_that_does_not_fit_ends_its_own_request_alone(
    hears: TinyHearing, album: list[Prompt], make_request: Any, drain: Any
) -> None:
    batcher = hears.batcher(encoder_bytes=30 * 4 * hearing.HIDDEN_SIZE)
    with pytest.raises(InvalidRequestError, match="40 tokens does not fit"):
        batcher.add(ask(make_request, hears.prompt().show(sound(7, 160))))
    elsewhere = hears.prompt().say(*range(10, 30))
    elsewhere.media = [MediaSpan(sound(7, 40), 3)]
    with pytest.raises(InvalidRequestError, match="no placeholders"):
        batcher.add(ask(make_request, elsewhere))
    lying = sound(8, 40)  # its mask says less than its tokens
    lying.features[0].values[0, :4] = 0
    short = sound(9, 40)
    misshapen = dataclasses.replace(
        short, features=(short.features[0], Feature("input_features", short.features[1].values[:, :, 1:]))
    )
    bad = [ask(make_request, hears.prompt().say(1).show(item).say(2)) for item in (lying, misshapen)]
    good = ask(make_request, album[0])
    for request in (*bad, good):
        batcher.add(request)
    events = drain(batcher)
    for request in bad:
        assert events[request][-1].finish_reason is FinishReason.ERROR
        assert isinstance(events[request][-1].error, EngineRequestError)
    assert [token for event in events[good] for token in event.token_ids] == hears.greedy(album[0], 12)
