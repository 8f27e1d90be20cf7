"""Makes the engine, or one for each device and a router before them, as the configuration says."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from ftserve.engine.client import Engine, EngineClient
from ftserve.engine.config import EngineConfig
from ftserve.engine.loop import EventSink
from ftserve.engine.null import NULL_TEXT, NullStepper
from ftserve.engine.router import EngineRouter
from ftserve.engine.stepper import Stepper
from ftserve.engine.types import GenerationRequest
from ftserve.preprocess.tokens import make_encoder
from ftserve.server.model import ServedModel


class Lane(Protocol):
    """Where an engine's events go: an output thread, or a front end in another process."""

    def feed(self) -> EventSink:
        """Return a way in, for one engine."""


def make_engine(config: EngineConfig, model: ServedModel, lanes: Sequence[Lane]) -> Engine:
    """Return the engine, not started, that sends its events to `lanes`."""
    engines = [
        EngineClient(partial(make_stepper, one, model), [lane.feed() for lane in lanes], replica=replica)
        for replica, one in enumerate(config.by_device())
    ]
    return engines[0] if len(engines) == 1 else EngineRouter(engines)


def make_stepper(config: EngineConfig, model: ServedModel) -> Stepper:
    """Make the engine's inside; on the engine thread, for seconds to minutes."""
    if model.embeds:
        from ftserve.engine.embedding import make_embedding_stepper
        from ftserve.engine.loader import LOADING

        with LOADING:
            return make_embedding_stepper(config, model.checkpoint)
    if config.kind == "null":
        return NullStepper(
            null_tokens(model),
            max_num_seqs=config.max_num_seqs,
            max_model_len=model.max_model_len,
            step_ms=config.null_step_ms,
            script_of=echo(model) if config.null_echo else None,
        )
    if config.kind == "simulated":
        from ftserve.engine.simulated import SimulatedStepper

        return SimulatedStepper(
            config, null_tokens(model), vocab_size=model.checkpoint.vocab_size, max_model_len=model.max_model_len
        )
    from ftserve.engine.loader import LOADING
    from ftserve.engine.torch_stepper import TorchStepper

    with LOADING:
        return TorchStepper(config, model.checkpoint)


def echo(model: ServedModel) -> Callable[[GenerationRequest], Sequence[int] | None]:
    """Return what finds the tokens of the last passage of a prompt between ⟦ and ⟧: tests script answers with it."""
    decode, encode = model.vocabulary.tokenizer.decode, make_encoder(model.tokenizer_json, use_fastokens=False)

    def script_of(request: GenerationRequest) -> Sequence[int] | None:
        prompt = decode(list(request.prompt_ids), skip_special_tokens=False)
        found = re.findall("⟦(.*?)⟧", prompt, re.DOTALL)
        return encode(found[-1], False) if found else None

    return script_of


def null_tokens(model: ServedModel) -> Sequence[int]:
    """Return the tokens of what engines without a model say."""
    return make_encoder(model.tokenizer_json, use_fastokens=False)(NULL_TEXT, False)
