"""Where options come from besides the command line: variables `FTSERVE_*`, then the file that `--config` names."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

ENVIRONMENT_PREFIX = "FTSERVE_"

_NOT_IN_FILE = ("help", "config")
_TRUTHS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add `--config`."""
    parser.add_argument(
        "--config",
        default=None,
        metavar="FILE",
        help="YAML file of options by their names here; arguments win over variables FTSERVE_NAME, those over the file",
    )


def defaults_from(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the defaults of `parser` that the environment and the file set; exits with code 2 on a bad one.

    Numbers stay text: argparse converts text that is a default as it converts arguments.
    """
    actions = {action.dest: action for action in parser._actions}  # noqa: SLF001 - argparse has no public list of its options
    given = _environment(parser, actions)
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_config_option(before)
    path = before.parse_known_args(arguments)[0].config or given.get("config")
    return {**(_file(parser, actions, path) if path else {}), **given}


def _environment(parser: argparse.ArgumentParser, actions: dict[str, argparse.Action]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, action in actions.items():
        variable = ENVIRONMENT_PREFIX + name.upper()
        value: Any = os.environ.get(variable)
        if value is not None and name != "help":
            if isinstance(action, argparse._AppendAction):  # noqa: SLF001 - the type of the options that take several
                value = value.split(",")
            found[name] = _checked(parser, action, value, variable)
    return found


def _file(parser: argparse.ArgumentParser, actions: dict[str, argparse.Action], path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as exc:
        parser.error(f"--config {path}: {exc.strerror}")
    except (UnicodeDecodeError, yaml.YAMLError):
        parser.error(f"--config {path}: is not YAML")
    if content is None:
        return {}
    if not isinstance(content, dict):
        parser.error(f"--config {path}: holds no options, which are lines 'name: value'")
    found: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in actions or name in _NOT_IN_FILE:
            parser.error(f"--config {path}: there is no option {str(key)[:100]!r}")
        if value is not None:
            found[name] = _checked(parser, actions[name], value, f"--config {path}: {key}")
    return found


def _checked(parser: argparse.ArgumentParser, action: argparse.Action, value: Any, where: str) -> Any:
    """Return `value` as argparse takes a default; what it does not look at in defaults is looked at here."""
    if isinstance(action, argparse.BooleanOptionalAction):
        truth = _TRUTHS.get(str(value).lower())
        if truth is None:
            parser.error(f"{where}: {value!r} is neither true nor false")
        return truth
    if isinstance(action, argparse._AppendAction):  # noqa: SLF001 - as above
        return [str(item) for item in value] if isinstance(value, list) else [str(value)]
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    if action.choices is not None and text not in action.choices:
        parser.error(f"{where}: {text!r} is not one of {[*action.choices]}")
    return text
