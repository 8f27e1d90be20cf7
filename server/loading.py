"""What is read of a model before anything runs: its files, what the operator says instead, the tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ftserve.engine.checkpoint import Checkpoint, CheckpointError, read_generation_defaults, resolve
from ftserve.engine.config import EngineConfig
from ftserve.server.config import ServerConfig
from ftserve.server.model import ServedModel


def load_model(config: ServerConfig) -> tuple[EngineConfig, ServedModel]:
    """Read the model that the configuration names, and fit the engine's configuration to it.

    Raises:
        CheckpointError: there is no such model, or a file that the operator names is not what it should be.
        ValueError: a setting does not fit the model.
    """
    name = config.served_model_name or config.model
    checkpoint = adjusted(Checkpoint.read(resolve(config.model), name=name), config)
    engine_config = config.engine.resolve(model_max_len=checkpoint.model_max_len)
    assert engine_config.max_model_len is not None, "resolve fills it in"
    model = ServedModel.load(
        checkpoint,
        name=name,
        max_model_len=engine_config.max_model_len,
        embeds=_is_embedding(engine_config, checkpoint),
        takes_templates=config.trust_request_chat_template,
        tool_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )
    return engine_config, model


def _is_embedding(config: EngineConfig, checkpoint: Checkpoint) -> bool:
    """Return whether the model is to make embeddings.

    Raises:
        ValueError: this engine cannot.
    """
    made_for_it = checkpoint.pooling is not None or not checkpoint.is_generating
    embeds = config.task == "embed" or (config.task == "auto" and made_for_it)
    if embeds and config.kind != "torch":
        raise ValueError(f"--engine {config.kind} makes no embeddings, and {checkpoint.name} is used for them")
    return embeds


def adjusted(checkpoint: Checkpoint, config: ServerConfig) -> Checkpoint:
    """Return what the model's files say, with what the operator says instead.

    Raises:
        CheckpointError: a file that the operator names is not what it should be.
    """
    if config.chat_template is not None:
        try:
            source = config.chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise CheckpointError(f"--chat-template {config.chat_template}: cannot be read as text") from exc
        checkpoint = replace(checkpoint, chat_template=source)
    if config.generation_config == "none":
        checkpoint = replace(checkpoint, generation_defaults={})
    elif config.generation_config != "auto":
        defaults = read_generation_defaults(Path(config.generation_config))
        checkpoint = replace(checkpoint, generation_defaults=defaults)
    return checkpoint
