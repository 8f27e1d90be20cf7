"""Chat messages to prompt text through the model's own Jinja template.

The environment is the one that Hugging Face chat templates are written for: sandboxed and immutable, `trim_blocks`
and `lstrip_blocks`, loop controls, `tojson`, `raise_exception`, `strftime_now`, and the `generation` tag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ftserve.engine.errors import InvalidRequestError

RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """A compiled template. Compile once a thread: compiled code is never freed on 3.13t."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`; `special_tokens` are names such as `bos_token` that the template may use.

        Raises:
            ValueError: the template does not compile.
        """
        try:
            self._template = _environment().from_string(source, globals=dict(special_tokens))
        except jinja2.TemplateSyntaxError as exc:
            raise ValueError(f"the chat template does not compile (line {exc.lineno}): {exc.message}") from exc

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text.

        Raises:
            InvalidRequestError: the template refuses these messages or fails on them.
        """
        extra = dict(kwargs or {})
        if taken := RESERVED_NAMES & extra.keys():
            raise InvalidRequestError(
                f"'chat_template_kwargs' must not contain '{min(taken)}'.", param="chat_template_kwargs"
            )
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None, **extra
            )
        except _RefusedError as exc:
            raise InvalidRequestError(f"The chat template refuses these messages: {exc}", param="messages") from None
        except Exception as exc:  # anything that user data can provoke inside a template
            raise InvalidRequestError(
                f"The chat template fails on these messages ({type(exc).__name__}).", param="messages"
            ) from exc


class _RefusedError(Exception):
    """Raised by a template's own `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; in serving its body is just output."""

    tags = {"generation"}  # noqa: RUF012 - the attribute that jinja2 reads

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # local time, as templates expect
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; prompts are not HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedError(message)
