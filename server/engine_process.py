"""The engine in a process of its own, which serves front ends in other processes."""

from __future__ import annotations

from pathlib import Path

from ftserve.engine.host import EngineHost, Lane
from ftserve.engine.threads import name_this_thread
from ftserve.server.config import ServerConfig
from ftserve.server.control import Channel
from ftserve.server.engines import make_engine
from ftserve.server.loading import load_model

_STOP_GRACE_S = 2.0


def run_engine(config: ServerConfig, number: int, folder: Path, channel: Channel) -> None:
    """Serve until the supervisor says stop. Main thread.

    Raises:
        EngineDeadError: the engine could not be loaded, or has died.
        CheckpointError, ValueError: the model or a setting is not one.
    """
    name_this_thread("ft-engine-host")
    engine_config, model = load_model(config)
    lanes = [Lane() for _ in range(config.front_ends)]
    engine = make_engine(engine_config, model, lanes)
    endpoint = f"ipc://{folder}/commands"
    host = EngineHost(
        engine,
        lanes,
        number=number,
        endpoint=endpoint,
        compile_grammar=model.grammars.compile_again,
        step_timeout_s=config.step_timeout_s,
        stalled=lambda link: channel.send("stalled", link=link),
    )
    engine.start()
    channel.send("listening", endpoint=endpoint)

    def obey() -> bool:
        message = channel.receive()
        if message is not None and message["kind"] == "front end lost":
            host.drop(message["link"])
            return True
        return False  # told to stop, or nobody is left to tell

    host.serve(channel.fileno(), obey)
    death = engine.death
    engine.close(_STOP_GRACE_S)
    host.close()
    model.close()
    if death is not None:
        raise death
