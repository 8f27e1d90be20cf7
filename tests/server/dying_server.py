"""The server with an engine that dies as soon as it is given a request with the seed `DEADLY`, and hangs with `STICKY`.

Run by test_engine_death; `LOADING` as first argument lets it die while loading.
"""

from __future__ import annotations

import sys
import threading

from ftserve.engine.config import EngineConfig
from ftserve.engine.null import NullStepper
from ftserve.engine.types import GenerationRequest, TokenEvent
from ftserve.server import engines
from ftserve.server.cli import run
from ftserve.server.model import ServedModel

DEADLY, STICKY = 13, 14
LOADING = "--while-loading"


class DyingStepper(NullStepper):
    is_doomed = is_stuck = False

    def add(self, request: GenerationRequest) -> None:
        super().add(request)
        self.is_doomed = self.is_doomed or request.sampling.seed == DEADLY
        self.is_stuck = self.is_stuck or request.sampling.seed == STICKY

    def step(self) -> list[TokenEvent]:
        if self.is_doomed:
            raise RuntimeError("the device is gone at /dev/secret0")
        if self.is_stuck:
            threading.Event().wait()
        return super().step()


def make_dying_stepper(_config: EngineConfig, _model: ServedModel) -> DyingStepper:
    return DyingStepper(range(1000, 1100), max_num_seqs=4, max_model_len=8192, step_ms=5)


def fail_to_load(_config: EngineConfig, _model: ServedModel) -> DyingStepper:
    raise RuntimeError("no memory at /dev/secret0")


if __name__ == "__main__":
    arguments = sys.argv[1:]
    make = fail_to_load if LOADING in arguments else make_dying_stepper
    engines.make_stepper = make  # type: ignore[assignment]  # its parameters have other names
    run([argument for argument in arguments if argument != LOADING])
