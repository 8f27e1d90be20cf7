"""The command line's options about how the model is shown to clients."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftserve.server.parsers.registry import (
    THOUGHT_PARSER_ALIASES,
    THOUGHT_PARSERS,
    TOOL_PARSER_ALIASES,
    TOOL_PARSERS,
)


def add_model_options(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    """Add the group; `defaults` are those of `ServerConfig`."""
    group = parser.add_argument_group("model")
    group.add_argument("--served-model-name", default=None, help="the name that clients use, if not the model's own")
    group.add_argument(
        "--chat-template", type=_file, default=None, metavar="FILE", help="Jinja template, if not the model's own"
    )
    group.add_argument(
        "--trust-request-chat-template",
        action=argparse.BooleanOptionalAction,
        default=defaults["trust_request_chat_template"],
        help="whether requests may bring a 'chat_template', which then runs in a process with limits",
    )
    group.add_argument(
        "--generation-config",
        default=defaults["generation_config"],
        metavar="auto|none|PATH",
        help="sampling values of requests that give none: the model's own, OpenAI's, or those of a "
        "generation_config.json or the folder it is in",
    )
    group.add_argument(
        "--tool-call-parser",
        choices=("auto", *TOOL_PARSERS, *TOOL_PARSER_ALIASES),
        default=defaults["tool_call_parser"],
        help="how the model writes tool calls; auto: as its chat template shows",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=("auto", "none", *THOUGHT_PARSERS, *THOUGHT_PARSER_ALIASES),
        default=defaults["reasoning_parser"],
        help="how the model marks its thoughts; auto: as its chat template shows, none: they are content",
    )


def _file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a file")
    return path
