"""Bodies of `POST /v1/responses`, and the chat requests that they are made into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ftserve.engine.errors import InvalidRequestError
from ftserve.server.wire import MAX_COUNT, ChatRequest, validate

# Values of unsupported fields that ask for nothing.
_NOTHING: tuple[Any, ...] = (None, False, 0, [], {}, "auto", "disabled", "default")
_UNSUPPORTED = (
    "background",
    "conversation",
    "include",
    "max_tool_calls",
    "moderation",
    "prompt",
    "top_logprobs",
    "truncation",
)
_NAMES = {  # of the fields of chat requests
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal", "summary_text": "text"}


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    format: dict[str, Any] | None = None


class ReasoningOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    effort: str | None = None


class ResponsesRequest(BaseModel):
    """What clients send. Unknown fields are ignored, known ones that are not built are refused."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = False
    store: bool | None = True
    previous_response_id: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    background: Any = None  # these are refused
    conversation: Any = None
    include: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt: Any = None
    top_logprobs: Any = None
    truncation: Any = None

    def check_supported(self) -> None:
        """Raise InvalidRequestError if a field asks for what is not built."""
        for name in _UNSUPPORTED:
            if getattr(self, name) not in _NOTHING:
                raise InvalidRequestError(
                    f"'{name}' is not supported by this server.", param=name, code="unsupported_parameter"
                )

    def to_chat(self, before: Sequence[dict[str, Any]]) -> tuple[ChatRequest, list[dict[str, Any]]]:
        """Return the same as a chat request, and its messages without the instructions.

        Args:
            before: the messages of the response that this one follows.

        Raises:
            InvalidRequestError: something is malformed or not supported.
        """
        self.check_supported()
        chat = [*before, *messages_of(self.input)]
        if not chat:
            raise InvalidRequestError("The input is empty.", param="input")
        opening = [{"role": "system", "content": self.instructions}] if self.instructions else []
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [*opening, *chat],
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": bool(self.stream),
            "tools": [_tool(tool, f"tools.{k}") for k, tool in enumerate(self.tools or ())],
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _response_format(self.text),
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if self.stream:
            fields["stream_options"] = {"include_usage": True}
        try:
            request = validate(ChatRequest, {name: value for name, value in fields.items() if value is not None})
        except InvalidRequestError as exc:
            raise _renamed(exc) from None
        return request, chat


def _renamed(error: InvalidRequestError) -> InvalidRequestError:
    """Return an error of a chat request under the name that the field has here."""
    name, dot, rest = (error.param or "").partition(".")
    param = _NAMES.get(name, name) + dot + rest
    return InvalidRequestError(error.message.replace(f"'{error.param}'", f"'{param}'"), param=param, code=error.code)


def messages_of(items: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return input items as chat messages.

    Raises:
        InvalidRequestError: an item is malformed or of a kind that is not supported.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for k, item in enumerate(items):
        _add(item, f"input.{k}", messages)
    return messages


def _add(item: dict[str, Any], where: str, messages: list[dict[str, Any]]) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in ("user", "assistant", "system", "developer"):
            raise InvalidRequestError("A message needs a role.", param=f"{where}.role")
        content = _content(item.get("content"), f"{where}.content")
        if role == "assistant":
            _answer(messages, fresh="content")["content"] = content
        else:
            messages.append({"role": role, "content": content})
    elif kind == "function_call":
        call = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
        answer = _answer(messages)
        calls = answer.setdefault("tool_calls", [])
        calls.append({"id": _string(item, "call_id", where), "type": "function", "function": call})
    elif kind == "function_call_output":
        content = _content(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": content})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or ()
        thought = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
        if thought:
            _answer(messages, fresh="reasoning_content")["reasoning_content"] = thought
    else:
        raise InvalidRequestError(f"Items of type {str(kind)[:40]!r} are not supported.", param=f"{where}.type")


def _answer(messages: list[dict[str, Any]], fresh: str = "") -> dict[str, Any]:
    """Return the assistant's message that is being put together, a new one if the last has its `fresh` member."""
    if not messages or messages[-1]["role"] != "assistant" or (fresh and messages[-1].get(fresh)):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _content(content: Any, where: str) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError("The content must be a string or a list of parts.", param=where)
    parts = [_part(part, f"{where}.{k}") for k, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _PARTS:
        return {"type": "text", "text": _string(part, _PARTS[kind], where)}
    if kind == "input_image":
        if part.get("file_id") is not None:
            raise InvalidRequestError("Images are taken by 'image_url' only.", param=f"{where}.file_id")
        return {"type": "image_url", "image_url": {"url": _string(part, "image_url", where)}}
    if kind == "input_audio":
        return {"type": kind, kind: part.get(kind)}
    raise InvalidRequestError(f"Parts of type {str(kind)[:40]!r} are not supported.", param=f"{where}.type")


def _string(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequestError(f"'{name}' must be a string.", param=f"{where}.{name}")
    return value


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:40]
        raise InvalidRequestError(f"Tools of type {kind!r} are not supported; 'function' is.", param=f"{where}.type")
    known = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in known if name in tool}}


def _choice(choice: str | dict[str, Any] | None) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    form = text.format if text is not None else None
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


Status = Literal["in_progress", "completed", "incomplete", "failed"]
