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


def shows_parts(source: str) -> bool:
    """Whether a template goes through the parts of a message's content, rather than print it as one text.

    That is a loop over `content`, or over a variable that was set from it.

    Raises:
        ValueError: the template does not compile.
    """
    try:
        tree = _environment().parse(source)
    except jinja2.TemplateSyntaxError as exc:
        raise ValueError(f"the chat template does not compile (line {exc.lineno}): {exc.message}") from exc
    names = {"content"} | {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node, set())
    }
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(expression: nodes.Node, names: set[str]) -> bool:
    """Whether an expression is a message's content, as it is or behind filters."""
    match expression:
        case nodes.Filter(node=inner) if inner is not None:
            return _is_content(inner, names)
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name(name=name):
            return name in names
    return False


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
