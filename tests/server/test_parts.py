"""Content parts: text stays, media become sources in order, what is malformed is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ftserve.engine.errors import InvalidRequestError
from ftserve.engine.types import Modality
from ftserve.server.parts import PartRules, media_options, split_parts

RULES = PartRules(
    max_items={Modality.IMAGE: 3, Modality.VIDEO: 1},
    shows_parts=True,
    marks={Modality.IMAGE: "<image>", Modality.VIDEO: "<video>"},
)
TEXT = {"type": "text", "text": "Look"}


def image(url: object = "data:,a", **fields: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **fields}


def user(*parts: dict[str, Any]) -> Any:
    return [{"role": "user", "content": list(parts)}]


def test_parts_of_any_role_and_order_become_marks_and_sources() -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief"},
        {"role": "tool", "content": [image("data:,1"), TEXT]},
        {"role": "user", "content": [TEXT, {"type": "video_url", "video_url": {"url": "data:,2"}}, image("data:,3")]},
    ]
    plain, sources = split_parts(messages, RULES, {Modality.VIDEO: (("fps", 1.0),)})
    assert [message["content"] for message in plain] == [
        "Be brief",
        [{"type": "image"}, TEXT],
        [TEXT, {"type": "video"}, {"type": "image"}],
    ]
    assert [source.url for source in sources] == ["data:,1", "data:,2", "data:,3"]
    assert [source.options for source in sources] == [(), (("fps", 1.0),), ()]
    assert sources[2].param == "messages.2.content.2.image_url"


def test_a_template_of_one_text_gets_marks_in_it() -> None:
    plain, _ = split_parts(user(image(), TEXT), replace(RULES, shows_parts=False), {})
    assert plain[0]["content"] == "<image>\nLook"


def test_sound_comes_as_data_or_as_a_url_and_any_template_shows_it() -> None:
    rules = replace(RULES, max_items={Modality.AUDIO: 2}, marks={Modality.AUDIO: "<audio>"})
    data = {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}}
    plain, sources = split_parts(user(data, {"type": "audio_url", "audio_url": {"url": "data:,a"}}), rules, {})
    assert [source.url for source in sources] == ["data:;base64,QUJD", "data:,a"]
    assert {source.modality for source in sources} == {Modality.AUDIO}
    assert all(part["type"] == "audio" and "audio_url" in part for part in plain[0]["content"])
    assert split_parts(user(data, TEXT), replace(rules, shows_parts=False), {})[0][0]["content"] == "<audio>\nLook"
    with pytest.raises(InvalidRequestError, match="More than 2 audio"):
        split_parts(user(data, data, data), rules, {})


def test_a_url_may_stand_without_its_object() -> None:
    _, sources = split_parts(user({"type": "image_url", "image_url": "data:,a"}), RULES, {})
    assert sources[0].url == "data:,a"


def test_a_bare_uuid_refers_to_the_cache_or_to_a_sibling() -> None:
    bare = {"type": "image_url", "image_url": None, "uuid": "cat"}
    _, sources = split_parts(user(bare, image("data:,cat", uuid="cat"), {**bare, "uuid": "dog"}), RULES, {})
    assert [source.url for source in sources] == ["data:,cat", "data:,cat", ""]


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "input_audio", "input_audio": {}}, "messages.0.content.0.type"),
        ({"type": ["image_url"]}, "messages.0.content.0.type"),
        ({}, "messages.0.content.0.type"),
        ({"type": "text", "text": 1}, "messages.0.content.0.text"),
        ({"type": "image_url"}, "messages.0.content.0.image_url.url"),
        (image(""), "messages.0.content.0.image_url.url"),
        (image(5), "messages.0.content.0.image_url.url"),
        (image(uuid=""), "messages.0.content.0.uuid"),
        (image(uuid=7), "messages.0.content.0.uuid"),
        (image(uuid="x" * 300), "messages.0.content.0.uuid"),
    ],
)
def test_a_malformed_part_is_named(part: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        split_parts(user(part), RULES, {})
    assert error.value.param == param


def test_too_many_parts_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="More than 3 image parts"):
        split_parts([*user(image(), image()), *user(image(), image())], RULES, {})


def test_a_modality_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="takes no content parts of type 'video_url'"):
        split_parts(user({"type": "video_url", "video_url": {"url": "data:,"}}), PartRules({}, True, {}), {})


def test_options_reach_the_modalities_that_they_fit() -> None:
    options = media_options({"max_pixels": 1000, "fps": 0.5}, {"video": {"num_frames": 8}})
    assert options == {
        Modality.IMAGE: (("max_pixels", 1000),),
        Modality.VIDEO: (("fps", 0.5), ("max_pixels", 1000), ("num_frames", 8)),
    }


@pytest.mark.parametrize(
    ("processor", "loading"),
    [
        ({"device": "cuda"}, None),
        ({"max_pixels": -1}, None),
        ({"max_pixels": True}, None),
        ({"max_pixels": "9"}, None),
        ({"max_pixels": float("inf")}, None),
        (None, {"audio": {}}),
        (None, {"image": {"fps": 2}}),
        (None, {"video": {"backend": 2}}),
    ],
)
def test_options_that_are_not_known_are_refused(processor: Any, loading: Any) -> None:
    with pytest.raises(InvalidRequestError):
        media_options(processor, loading)
