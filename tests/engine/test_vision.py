"""Vision-language models in the engine: what they say of pictures and clips is what transformers says of them."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from ftserve.engine.errors import EngineRequestError, InvalidRequestError
from ftserve.engine.types import FinishReason, MediaItem, MediaSpan, Modality
from tests.engine.seeing import END, FAMILIES, IMAGE, START, Prompt, TinySeeing, picture

pytestmark = pytest.mark.usefixtures("queueing")


@pytest.fixture(scope="session")
def load(torch: Any) -> Any:
    """Return a family's tiny model, made once."""
    made: dict[str, TinySeeing] = {}
    return lambda family: made[family] if family in made else made.setdefault(family, TinySeeing(family))


@pytest.fixture(params=FAMILIES)
def seeing(request: pytest.FixtureRequest, load: Any) -> TinySeeing:
    found: TinySeeing = load(request.param)
    return found


@pytest.fixture
def qwen(load: Any) -> TinySeeing:
    found: TinySeeing = load("Qwen2_5_VLConfig")
    return found


def clip(rng: random.Random, seconds: float) -> MediaItem:
    return dataclasses.replace(picture(rng, (3, 4, 6)), second_per_grid=seconds)


@pytest.fixture
def album(seeing: TinySeeing) -> list[Prompt]:
    """Prompts with one image, several, a clip, both, and none."""
    rng = random.Random(3)
    one, two, film = picture(rng), picture(rng, (1, 6, 8)), clip(rng, 2.0)
    return [
        seeing.prompt().say(5, 6).show(one).say(7, 8, 9),
        seeing.prompt().show(two).say(4).show(one).say(3, 9, 11).show(two).say(2),
        seeing.prompt().say(20, 21).show(film).say(22),
        seeing.prompt().show(one).say(30).show(film).show(two).say(31, 32),
        seeing.prompt().say(1, 40, 41, 42, 43),
    ]


def ask(make_request: Any, prompt: Prompt, max_tokens: int = 12, **options: Any) -> Any:
    return make_request(prompt.ids, max_tokens, media=prompt.media, **options)


@pytest.mark.parametrize("chunk", [1, 2, 5, 11, 64, 300])
def test_greedy_equals_transformers_wherever_chunks_cut_images(
    seeing: TinySeeing, album: list[Prompt], make_request: Any, texts: Any, chunk: int
) -> None:
    batcher = seeing.batcher(chunk=chunk)
    for _ in ("cold", "warm"):
        got = texts(batcher, [ask(make_request, prompt) for prompt in album])
        assert got == [seeing.greedy(prompt, 12) for prompt in album]


@pytest.mark.parametrize("use_prefix_cache", [False, True])
def test_greedy_equals_transformers_under_preemption_with_little_memory_for_embeddings(
    seeing: TinySeeing, album: list[Prompt], make_request: Any, texts: Any, use_prefix_cache: bool
) -> None:
    bytes_per_token = 48 * 4 * (3 if "3" in type(seeing.model).__name__ else 1)
    batcher = seeing.batcher(
        num_blocks=48, chunk=9, use_prefix_cache=use_prefix_cache, encoder_bytes=16 * bytes_per_token
    )
    got = texts(batcher, [ask(make_request, prompt, 24) for prompt in album])
    assert got == [seeing.greedy(prompt, 24) for prompt in album]
    assert batcher.statistics().num_preemptions > 0
    assert batcher.statistics().encoder.evictions > 0
    assert batcher.statistics().encoder.held_tokens <= 16


def test_greedy_does_not_depend_on_who_joins_and_leaves(
    seeing: TinySeeing, album: list[Prompt], make_request: Any, drain: Any
) -> None:
    batcher = seeing.batcher(chunk=7, max_num_seqs=4)
    watched, leaving = [], []
    got: dict[Any, list[int]] = {}
    for number, prompt in enumerate(album * 2):
        request = ask(make_request, prompt)
        watched.append((request, prompt))
        batcher.add(request)
        passer_by = ask(make_request, album[number % 4], 40)
        batcher.add(passer_by)
        leaving.append(passer_by)
        for event in batcher.step():
            got.setdefault(event.request, []).extend(event.token_ids)
        if number % 3:
            batcher.cancel(leaving.pop(0))
    for request in leaving:
        batcher.cancel(request)
    for request, events in drain(batcher).items():
        got.setdefault(request, []).extend(token for event in events for token in event.token_ids)
    for request, prompt in watched:
        assert got[request] == seeing.greedy(prompt, 12)


def test_an_image_is_encoded_once_for_all_who_show_it(qwen: TinySeeing, make_request: Any, texts: Any) -> None:
    image = picture(random.Random(1))
    asked = [qwen.prompt().say(number).show(image).say(9) for number in range(10, 16)]
    batcher = qwen.batcher()
    assert texts(batcher, [ask(make_request, p) for p in asked]) == [qwen.greedy(p, 12) for p in asked]
    assert batcher.statistics().encoder.encoded == 1
    assert batcher.statistics().encoder.hits == 5


def test_images_inside_a_known_prefix_are_not_encoded_again(qwen: TinySeeing, make_request: Any, drain: Any) -> None:
    image = picture(random.Random(1), (1, 6, 6))
    batcher = qwen.batcher(encoder_bytes=9 * 48 * 4)
    first = qwen.prompt().say(1).show(image).say(2, 3, 4, 5, 6)
    batcher.add(ask(make_request, first))
    drain(batcher)
    other = qwen.prompt().say(7).show(picture(random.Random(2), (1, 6, 6))).say(2)
    batcher.add(ask(make_request, other))  # takes the room of the first one's embeddings
    drain(batcher)
    follow_up = qwen.prompt().say(1).show(image).say(2, 3, 4, 5, 6, 60, 61, 62)
    request = ask(make_request, follow_up)
    batcher.add(request)
    events = drain(batcher)[request]
    assert events[0].num_cached_tokens == 16
    assert [token for event in events for token in event.token_ids] == qwen.greedy(follow_up, 12)
    assert batcher.statistics().encoder.encoded == 2


def test_the_same_placeholders_for_another_image_are_another_prefix(
    seeing: TinySeeing, make_request: Any, texts: Any, drain: Any
) -> None:
    batcher = seeing.batcher()
    for seed in (1, 2):
        prompt = seeing.prompt().say(1).show(picture(random.Random(seed), (1, 8, 8))).say(2, 3, 4)
        request = ask(make_request, prompt)
        batcher.add(request)
        events = drain(batcher)[request]
        assert events[0].num_cached_tokens == 0
        assert [token for event in events for token in event.token_ids] == seeing.greedy(prompt, 12)


def test_many_images_at_once_do_not_keep_a_stream_waiting(qwen: TinySeeing, make_request: Any) -> None:
    batcher = qwen.batcher(chunk=20)
    stream = make_request([1, 2, 3], 60)
    batcher.add(stream)
    batcher.step()
    rng = random.Random(4)
    for _ in range(6):
        batcher.add(ask(make_request, qwen.prompt().show(picture(rng, (1, 8, 8))).say(2), 4))
    steps = encoded = 0
    while batcher.num_running() + batcher.num_waiting() > 1:
        assert any(event.request is stream for event in batcher.step())
        now = batcher.statistics().encoder.encoded
        assert now - encoded <= 1  # 16 tokens each: two are more than the 20 of a step
        encoded, steps = now, steps + 1
    assert (encoded, steps < 12) == (6, True)


def test_a_prompt_may_end_in_an_image(seeing: TinySeeing, make_request: Any, texts: Any) -> None:
    prompt = seeing.prompt().say(1, 2, 3).show(picture(random.Random(2)))
    prompt.ids.pop()
    for chunk in (1, 3, 64):
        batcher = seeing.batcher(chunk=chunk)
        for _ in ("cold", "warm"):  # `generate` goes on counting from the image's last corner, and so differs
            answer = texts(batcher, [ask(make_request, prompt)])[0]
            assert seeing.follows(prompt, answer)


def wrong_spans() -> dict[str, tuple[list[int], list[MediaSpan]]]:
    """Return prompts and spans that do not go together."""
    image = picture(random.Random(1), (1, 4, 4))
    ids = [1, START, *[IMAGE] * 4, END, 2]
    misfit = dataclasses.replace(image, patches=image.own_patches[:, :-1])
    return {
        "elsewhere": (ids, [MediaSpan(image, 3)]),
        "past the end": (ids, [MediaSpan(image, 7)]),
        "before the start": (ids, [MediaSpan(image, -2)]),
        "twice": (ids, [MediaSpan(image, 2), MediaSpan(image, 2)]),
        "of another kind": (ids, [MediaSpan(dataclasses.replace(image, modality=Modality.VIDEO), 2)]),
        "patches of another size": (ids, [MediaSpan(misfit, 2)]),
        "not enough patches": (ids, [MediaSpan(dataclasses.replace(image, patches=image.own_patches[1:]), 2)]),
        "another count": (ids, [MediaSpan(dataclasses.replace(image, num_tokens=3), 2)]),
        "touching": ([1, *[IMAGE] * 8, 2], [MediaSpan(image, 1), MediaSpan(image, 5)]),
    }


@pytest.mark.parametrize("case", wrong_spans())
def test_media_that_do_not_fit_are_refused(qwen: TinySeeing, make_request: Any, case: str) -> None:
    ids, media = wrong_spans()[case]
    batcher = qwen.batcher()
    with pytest.raises(InvalidRequestError):
        batcher.add(make_request(ids, media=media))
    assert batcher.num_waiting() == 0


def test_an_image_that_is_larger_than_the_memory_for_embeddings_is_refused(qwen: TinySeeing, make_request: Any) -> None:
    batcher = qwen.batcher(encoder_bytes=4 * 48 * 4)
    with pytest.raises(InvalidRequestError, match="9 tokens is too large: the engine holds 4"):
        batcher.add(ask(make_request, qwen.prompt().show(picture(random.Random(1), (1, 6, 6))).say(1)))


def test_models_without_eyes_refuse_images(tiny_llama: Any, make_request: Any) -> None:
    batcher = tiny_llama.batcher()
    with pytest.raises(InvalidRequestError, match="takes no images"):
        batcher.add(make_request([1, 2], media=[MediaSpan(picture(random.Random(1)), 0)]))


def test_an_image_that_runs_out_of_memory_fails_alone(
    qwen: TinySeeing, make_request: Any, drain: Any, torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(6)
    batcher = qwen.batcher(chunk=100)
    tower = batcher._runner._tower
    encode = tower._encode

    def fail_if_large(rows: Any, grids: Any) -> Any:
        if any(grid == (1, 8, 10) for grid in grids):
            raise torch.OutOfMemoryError
        return encode(rows, grids)

    monkeypatch.setattr(tower, "_encode", fail_if_large)
    prompts = [qwen.prompt().say(n).show(picture(rng, (1, 4, 4))).say(1) for n in range(3)]
    good = [ask(make_request, prompt) for prompt in prompts]
    large = ask(make_request, qwen.prompt().show(picture(rng, (1, 8, 10))).say(1))
    for request in (good[0], large, *good[1:]):
        batcher.add(request)
    events = drain(batcher)
    assert [(e.finish_reason, type(e.error)) for e in events[large]] == [(FinishReason.ERROR, EngineRequestError)]
    for request, prompt in zip(good, prompts, strict=True):
        assert [token for e in events[request] for token in e.token_ids] == qwen.greedy(prompt, 12)
    assert set(tower._kept) == set(batcher.scheduler._encoder._entries)


def test_pixels_are_normalized_as_their_processor_does(qwen: TinySeeing, torch: Any) -> None:
    from ftserve.engine.media import MediaUnit
    from ftserve.preprocess.images import PatchRules, normalize

    tower = qwen.batcher()._runner._tower
    image = picture(random.Random(1), (1, 4, 4))
    rules = PatchRules(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    ours = tower._normalized(MediaUnit(b"", 0, 4, image, 0)).numpy()
    assert np.allclose(ours, normalize(image.own_patches, rules), atol=1e-5)


def test_other_families_are_refused_at_start(torch: Any) -> None:
    import transformers

    from ftserve.engine.loader import UnsupportedModelError
    from ftserve.engine.vision_runner import make_tower
    from tests.engine.seeing import INPUTS

    text = {"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaNextConfig(text_config=text, vision_config=tower)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with pytest.raises(UnsupportedModelError, match="LlavaNextForConditionalGeneration: of vision-language models, "):
        make_tower(model, INPUTS, max_bytes=1 << 20)
