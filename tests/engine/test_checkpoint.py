from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ftserve.engine import checkpoint
from ftserve.engine.checkpoint import AudioInputs, Checkpoint, CheckpointError, Normalization, VisionInputs, resolve

CONFIG = {"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 64, "eos_token_id": 3, "bos_token_id": 1}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write(tmp_path, "config.json", CONFIG)
    write(tmp_path, "tokenizer.json", {})
    return tmp_path


def write(directory: Path, name: str, content: Any) -> None:
    (directory / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_the_least_a_model_can_say(directory: Path) -> None:
    read = Checkpoint.read(directory)
    assert (read.path, read.name, read.tokenizer_json) == (directory, directory.name, directory / "tokenizer.json")
    assert (read.model_max_len, read.vocab_size, read.bos_token_id) == (64, 100, 1)
    assert read.eos_token_ids == {3}
    assert read.chat_template is None
    assert (read.special_tokens, read.generation_defaults, read.vision) == ({}, {}, None)
    assert Checkpoint.read(directory, name="shown").name == "shown"


def test_the_generation_config_wins(directory: Path) -> None:
    write(directory, "generation_config.json", {"eos_token_id": [7, 8], "bos_token_id": 5})
    read = Checkpoint.read(directory)
    assert (read.eos_token_ids, read.bos_token_id) == (frozenset({7, 8}), 5)


def test_a_text_config_inside_is_found(directory: Path) -> None:
    text = {"vocab_size": 200, "max_position_embeddings": 32, "eos_token_id": 9}
    write(directory, "config.json", {"model_type": "qwen2_vl", "text_config": text, "vision_config": {}})
    read = Checkpoint.read(directory)
    assert (read.model_max_len, read.vocab_size, read.eos_token_ids) == (32, 200, frozenset({9}))
    assert (read.model_type, read.vision) == ("qwen2_vl", None)


@pytest.mark.parametrize("nested", [False, True], ids=["a file each", "one file"])
def test_how_pictures_are_shown_is_found(directory: Path, nested: bool) -> None:
    write(directory, "config.json", CONFIG | {"vision_config": {}, "image_token_id": 7, "video_token_id": 8})
    image, video = {"image_mean": [0.1], "image_std": [0.2]}, {"image_mean": [0.3], "image_std": [0.4]}
    if nested:
        write(directory, "processor_config.json", {"image_processor": image, "video_processor": video})
    else:
        write(directory, "preprocessor_config.json", image)
        write(directory, "video_preprocessor_config.json", video)
    assert Checkpoint.read(directory).vision == VisionInputs(
        image_token_id=7,
        video_token_id=8,
        image=Normalization(mean=(0.1,), std=(0.2,)),
        video=Normalization(mean=(0.3,), std=(0.4,)),
    )


def test_a_model_without_video_or_processor_has_defaults(directory: Path) -> None:
    write(directory, "config.json", CONFIG | {"vision_config": {}, "image_token_index": 7})
    vision = Checkpoint.read(directory).vision
    assert vision is not None
    assert (vision.image_token_id, vision.video_token_id, vision.image) == (7, None, Normalization())


def test_how_sound_is_shown_is_found(directory: Path) -> None:
    hearing = CONFIG | {"model_type": "qwen2_audio", "audio_token_index": 7}
    write(directory, "config.json", hearing)
    assert Checkpoint.read(directory).media_inputs == AudioInputs(audio_token_id=7, num_mel_bins=128, num_frames=3000)
    write(directory, "config.json", hearing | {"audio_config": {"num_mel_bins": 80, "max_source_positions": 50}})
    assert Checkpoint.read(directory).audio == AudioInputs(audio_token_id=7, num_mel_bins=80, num_frames=100)
    write(directory, "config.json", hearing | {"model_type": "unheard_of"})
    assert Checkpoint.read(directory).media_inputs is None


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({"chat_template.jinja": "J", "tokenizer_config.json": {"chat_template": "T"}}, "J"),
        ({"tokenizer_config.json": {"chat_template": "T"}}, "T"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
                }
            },
            "D",
        ),
        ({"tokenizer_config.json": {"chat_template": [{"name": "rag", "template": "R"}]}}, None),
        ({"chat_template.json": {"chat_template": "P"}}, "P"),
    ],
)
def test_the_template_is_found_in_each_of_its_places(
    directory: Path, files: dict[str, Any], template: str | None
) -> None:
    for name, content in files.items():
        write(directory, name, content)
    assert Checkpoint.read(directory).chat_template == template


def test_special_tokens_are_text_or_objects(directory: Path) -> None:
    write(directory, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None})
    write(directory, "special_tokens_map.json", {"unk_token": {"content": "<unk>"}, "bos_token": "other"})
    assert Checkpoint.read(directory).special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.9},
        ),
        ({"temperature": 0.6, "repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"do_sample": True, "temperature": None}, {}),
    ],
)
def test_sampling_defaults_count_only_where_sampling_is_meant(
    directory: Path, generation: dict[str, Any], defaults: dict[str, float]
) -> None:
    write(directory, "generation_config.json", generation)
    assert Checkpoint.read(directory).generation_defaults == defaults


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": None}, "no config.json"),
        ({"tokenizer.json": None}, "no tokenizer.json"),
        ({"config.json": "{"}, "cannot be read as JSON"),
        ({"config.json": []}, "holds no JSON object"),
        ({"config.json": {"max_position_embeddings": 5}}, "vocab_size is None"),
        ({"config.json": {"vocab_size": 5, "max_position_embeddings": "x"}}, "max_position_embeddings is 'x'"),
    ],
)
def test_what_is_wrong_is_said(directory: Path, files: dict[str, Any], message: str) -> None:
    for name, content in files.items():
        if content is None:
            (directory / name).unlink()
        else:
            write(directory, name, content)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.read(directory)


def test_a_directory_is_itself(directory: Path) -> None:
    assert resolve(str(directory)) == directory


@pytest.mark.parametrize("model", ["/no/such", "./no-such", "~no-such", "a/b/c"])
def test_a_path_that_is_no_directory_is_not_looked_up_on_the_hub(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_download", pytest.fail)
    with pytest.raises(CheckpointError, match="no such directory"):
        resolve(model)


def test_a_hub_that_cannot_be_reached_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(CheckpointError, match="cannot be fetched from the Hugging Face hub \\(ConnectionError\\)"):
        resolve("someone/something")


def test_reading_needs_no_torch() -> None:
    code = "import ftserve.engine.checkpoint, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-X", "gil=0", "-c", code], check=False).returncode == 0
