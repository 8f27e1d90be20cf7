"""Chat messages to prompt text through the model's own Jinja template.

The environment is the one that Hugging Face chat templates are written for: sandboxed and immutable, `trim_blocks`
and `lstrip_blocks`, loop controls, `tojson`, `raise_exception`, `strftime_now`, and the `generation` tag.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ftserve.engine.errors import InvalidRequestError

RESERVED_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


_MAX_RENDER_S = 5.0  # nested loops over messages and tools can take any time
_CONTINUES = "\ue000ftserve continues here\ue001"  # marks where the last message ends


class ChatTemplate:
    """A compiled template, for one thread. Compile once: compiled code is never freed on 3.13t."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`; `special_tokens` are names such as `bos_token` that the template may use.

        Raises:
            ValueError: the template does not compile.
        """
        self._deadline = 0.0
        environment = _environment()
        try:
            tree = _with_ticks(environment, source, self._tick)
            self._template = environment.from_string(tree, globals=dict(special_tokens))
        except jinja2.TemplateSyntaxError as exc:
            raise ValueError(f"the chat template does not compile (line {exc.lineno}): {exc.message}") from exc

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return the prompt text; with `continue_final` it ends with the content of the last message.

        Raises:
            InvalidRequestError: the template refuses these messages or fails on them.
        """
        if continue_final:
            text = self._render(_marked(messages), False, kwargs, documents, tools)
            end = text.rfind(_CONTINUES)
            if end < 0:
                raise InvalidRequestError(
                    "The chat template does not show the last message as it is.", param="messages"
                )
            return text[:end]
        return self._render(messages, add_generation_prompt, kwargs, documents, tools)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        tools: Sequence[Mapping[str, Any]] | None,
    ) -> str:
        extra = dict(kwargs or {})
        if taken := RESERVED_NAMES & extra.keys():
            raise InvalidRequestError(
                f"'chat_template_kwargs' must not contain '{min(taken)}'.", param="chat_template_kwargs"
            )
        self._deadline = time.monotonic() + _MAX_RENDER_S
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=documents,
                **extra,
            )
        except _TooLongError:
            raise InvalidRequestError(
                f"The chat template takes more than {_MAX_RENDER_S:g} s on these messages.", param="messages"
            ) from None
        except _RefusedError as exc:
            raise InvalidRequestError(f"The chat template refuses these messages: {exc}", param="messages") from None
        except Exception as exc:  # anything that user data can provoke inside a template
            raise InvalidRequestError(
                f"The chat template fails on these messages ({type(exc).__name__}).", param="messages"
            ) from exc

    def _tick(self) -> None:
        """Look at the clock; the template calls it in each round of a loop and in each macro."""
        if time.monotonic() > self._deadline:
            raise _TooLongError


def _with_ticks(environment: jinja2.Environment, source: str, tick: Callable[[], None]) -> nodes.Template:
    """Parse `source`, and have each round of its loops and each call of its macros call `tick`."""
    tree = environment.parse(source)
    environment.tick = tick  # type: ignore[attr-defined]  # where `EnvironmentAttribute` finds it
    for block in (*tree.find_all(nodes.For), *tree.find_all((nodes.Macro, nodes.CallBlock))):
        assert isinstance(block, nodes.For | nodes.Macro | nodes.CallBlock)
        call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        statement = nodes.ExprStmt(call, lineno=block.lineno)
        block.body.insert(0, statement.set_environment(environment))
    return tree


def _marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the messages with a mark behind the content of the last one."""
    *before, last = messages
    content = last.get("content")
    if isinstance(content, str):
        return [*before, {**last, "content": content + _CONTINUES}]
    if isinstance(content, list) and content and isinstance(content[-1].get("text"), str):
        part = {**content[-1], "text": content[-1]["text"] + _CONTINUES}
        return [*before, {**last, "content": [*content[:-1], part]}]
    raise InvalidRequestError("'continue_final_message' needs a last message that ends with text.", param="messages")


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


class _TooLongError(Exception):
    """Raised in a template that takes too long."""


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
