"""Where a model's files are, and what they say about it, read without torch.

A checkpoint is a directory as transformers writes it: `config.json`, safetensors, `tokenizer.json`, and optionally
`generation_config.json`, `tokenizer_config.json` and a chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftserve.engine import builtin
from ftserve.engine.pooling import Pooling, is_generating, read_pooling

# Vision-language families by transformers' `model_type`: those whose patches we cut ourselves, and those that get what
# their own processor makes of an image.
PATCH_FAMILIES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
FEATURE_FAMILIES = frozenset({"idefics3", "llava", "llava_onevision", "mistral3", "smolvlm"})
AUDIO_FAMILIES = frozenset({"qwen2_audio"})  # those that hear

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
_SIZE_KEYS = ("hidden_size", "n_embd", "d_model", "dim")
_OFFSET_POSITIONS = ("camembert", "roberta", "xlm-roberta")  # count positions from behind the padding id
_GENERATION_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class CheckpointError(ValueError):
    """A model cannot be found, or its files lack something that serving needs. The message is for the operator."""


def resolve(model: str) -> Path:
    """Return the directory of `model`: a built-in name, a local directory, or else an id on the Hugging Face hub.

    May download and convert, so it may take long; torch is imported only to convert a built-in model.

    Raises:
        CheckpointError: there is no such model, or it cannot be fetched.
    """
    if model in builtin.BUILTIN_MODELS:
        try:
            return builtin.prepare(model)
        except builtin.BuiltinModelError as exc:
            raise CheckpointError(str(exc)) from exc
    try:
        directory = Path(model).expanduser()
    except RuntimeError as exc:  # ~name of nobody
        raise CheckpointError(f"model {model!r}: no such directory") from exc
    if directory.is_dir():
        return directory
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        raise CheckpointError(f"model {model!r}: no such directory")
    return _download(model)


def _download(repository: str) -> Path:
    """Return the snapshot of a hub repository, from the hub's own cache where it is there already."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, allow_patterns=_HUB_FILES))
    except Exception as exc:  # the hub's client raises its own, httpx's and OS errors alike
        names = ", ".join(builtin.BUILTIN_MODELS)
        raise CheckpointError(
            f"model {repository!r} is neither a built-in name ({names}) nor a directory, "
            f"and it cannot be fetched from the Hugging Face hub ({type(exc).__name__})"
        ) from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalization:
    """What the vision tower's input is made of: (pixel / 255 - mean) / std, by channel."""

    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)  # CLIP's, which Qwen-VL's processors default to
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionInputs:
    """How a vision-language model's prompt and pixels look."""

    image_token_id: int  # the placeholder of one merged patch of an image
    video_token_id: int | None
    image: Normalization
    video: Normalization


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioInputs:
    """How an audio-language model's prompt and sound look."""

    audio_token_id: int  # the placeholder of one embedding
    num_mel_bins: int
    num_frames: int  # of the spectrum of a clip, with the silence behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What the files of a model say. Any thread may read it; the mappings are never written again."""

    path: Path
    name: str
    model_max_len: int  # positions that the model was made for
    vocab_size: int  # rows of the embedding; a tokenizer may know fewer ids
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    chat_template: str | None  # Jinja source
    tokenizer_json: Path
    special_tokens: Mapping[str, str]  # bos_token, eos_token, unk_token, pad_token, as far as there are
    generation_defaults: Mapping[str, float | int]  # sampling values that the model's makers recommend
    model_type: str  # transformers' name of the family
    vision: VisionInputs | None  # None: takes no pictures
    audio: AudioInputs | None  # None: takes no sound
    hidden_size: int | None  # of a token's hidden state
    is_generating: bool  # continues text; others only make vectors of it
    pooling: Pooling | None  # how vectors are made, where its makers say so

    @classmethod
    def read(cls, path: Path, *, name: str | None = None) -> Checkpoint:
        """Read a directory that `resolve` returned; `name` is what clients call it, by default the directory's.

        Raises:
            CheckpointError: a file is missing, is not JSON, or lacks a needed value.
        """
        config = _read_json(path / "config.json", required=True)
        text_config = config.get("text_config") or config
        generation = _read_json(path / "generation_config.json")
        tokenizer_config = _read_json(path / "tokenizer_config.json")
        tokenizer_json = path / "tokenizer.json"
        if not tokenizer_json.is_file():
            raise CheckpointError(f"{path}: no tokenizer.json; ftserve needs a model with a fast tokenizer")
        sources = (generation, config, text_config)
        try:
            pooling = read_pooling(path)
        except ValueError as exc:
            raise CheckpointError(str(exc)) from exc
        sizes = [_first((text_config, config), key) for key in _SIZE_KEYS]
        max_len = _positive(path, (text_config, config), _LENGTH_KEYS)
        if config.get("model_type") in _OFFSET_POSITIONS:
            max_len -= int(config.get("pad_token_id") or 0) + 1
        if pooling is not None and pooling.max_len is not None:
            max_len = min(max_len, pooling.max_len)
        bos = _first(sources, "bos_token_id")
        return cls(
            path=path,
            name=name or path.name,
            model_max_len=max_len,
            vocab_size=_positive(path, (text_config, config), ("vocab_size",)),
            eos_token_ids=_token_ids(_first(sources, "eos_token_id")),
            bos_token_id=bos if isinstance(bos, int) else None,
            chat_template=_chat_template(path, tokenizer_config),
            tokenizer_json=tokenizer_json,
            special_tokens=_special_tokens(_read_json(path / "special_tokens_map.json"), tokenizer_config),
            generation_defaults=_generation_defaults(generation),
            model_type=str(config.get("model_type", "")),
            vision=_vision_inputs(path, config),
            audio=_audio_inputs(config),
            hidden_size=next((size for size in sizes if isinstance(size, int)), None),
            is_generating=is_generating(config.get("architectures") or ()),
            pooling=pooling,
        )

    @property
    def media_inputs(self) -> VisionInputs | AudioInputs | None:
        """What the model takes beside text."""
        return self.vision or self.audio


def read_generation_defaults(path: Path) -> dict[str, float | int]:
    """Return the sampling values that a `generation_config.json`, or the one in a directory, recommends.

    Raises:
        CheckpointError: there is none.
    """
    file = path / "generation_config.json" if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"{file}: no such generation config")
    return _generation_defaults(_read_json(file))


def _read_json(file: Path, *, required: bool = False) -> dict[str, Any]:
    """Return the object in `file`, empty where a file that is not `required` is missing."""
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError as exc:
        if not required:
            return {}
        raise CheckpointError(f"{file.parent}: no {file.name}; this is no model directory") from exc
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{file}: cannot be read as JSON ({exc})") from exc
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds no JSON object")
    return content


def _vision_inputs(path: Path, config: dict[str, Any]) -> VisionInputs | None:
    """Return how pictures are shown to the model; None for one that has no placeholder for them."""
    image_token = config.get("image_token_id", config.get("image_token_index"))
    if "vision_config" not in config or not isinstance(image_token, int):
        return None
    video_token = config.get("video_token_id")
    whole = _read_json(path / "processor_config.json")
    image = whole.get("image_processor") or _read_json(path / "preprocessor_config.json")
    video = whole.get("video_processor") or _read_json(path / "video_preprocessor_config.json") or image
    return VisionInputs(
        image_token_id=image_token,
        video_token_id=video_token if isinstance(video_token, int) else None,
        image=_normalization(image),
        video=_normalization(video),
    )


def _audio_inputs(config: dict[str, Any]) -> AudioInputs | None:
    """Return how sound is shown to the model; None for one of no family that hears."""
    token = config.get("audio_token_id", config.get("audio_token_index"))
    if config.get("model_type") not in AUDIO_FAMILIES or not isinstance(token, int):
        return None
    tower = config.get("audio_config") or {}
    return AudioInputs(  # the defaults are those of transformers' Qwen2AudioEncoderConfig
        audio_token_id=token,
        num_mel_bins=tower.get("num_mel_bins", 128),
        num_frames=2 * tower.get("max_source_positions", 1500),
    )


def _normalization(processor: dict[str, Any]) -> Normalization:
    given = {"mean": processor.get("image_mean"), "std": processor.get("image_std")}
    return Normalization(**{key: tuple(value) for key, value in given.items() if value})


def _first(sources: tuple[dict[str, Any], ...], key: str) -> Any:
    return next((source[key] for source in sources if source.get(key) is not None), None)


def _positive(path: Path, sources: tuple[dict[str, Any], ...], keys: tuple[str, ...]) -> int:
    """Return the first value of `keys` in `sources`, which must be a positive integer."""
    value = next((found for key in keys if (found := _first(sources, key)) is not None), None)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{path / 'config.json'}: {keys[0]} is {value!r}, not a positive integer")
    return value


def _token_ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset((value,))


def _chat_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """Return the template's source from the newest of the three places where it has been kept over the years."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template") or _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several named templates; tool use and retrieval have their own in some models
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(special_tokens_map: dict[str, Any], tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Return the text of the four tokens that chat templates refer to; each is stored as text or as an object."""
    tokens: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = _first((tokenizer_config, special_tokens_map), key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[key] = text
    return tokens


def _generation_defaults(generation: dict[str, Any]) -> dict[str, float | int]:
    """Return recommended sampling values; those that only matter to sampling count only if it is recommended."""
    keys = _GENERATION_KEYS if generation.get("do_sample") else ("repetition_penalty",)
    return {key: generation[key] for key in keys if isinstance(generation.get(key), int | float)}
