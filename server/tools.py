"""Tools in requests: their definitions, which of them must be called, and how a model is told of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from ftserve.engine.errors import InvalidRequestError
from ftserve.engine.grammar import Grammar, GrammarMaker

MAX_TOOLS = 1024

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]


class FunctionTool(BaseModel):
    """What a function is called and takes."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """One entry of `tools`."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    name: str


class NamedChoice(BaseModel):
    """A `tool_choice` of one function."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedChoice


@dataclass(frozen=True, slots=True)
class CallPlan:
    """Which tools one request may call, and which it has to."""

    definitions: Sequence[Mapping[str, Any]]  # for the prompt, as they were sent
    schemas: Mapping[str, Any]  # of the arguments, by name
    is_forced: bool = False  # the output is calls and nothing else
    forced_name: str | None = None  # of this function
    max_calls: int | None = None

    @classmethod
    def of(cls, tools: Sequence[Tool] | None, choice: ToolChoice | None, *, is_parallel: bool) -> CallPlan | None:
        """Return the plan of a request; None if nothing can be called.

        Raises:
            InvalidRequestError: the choice does not fit the tools.
        """
        check_choice(choice, tools)
        if not tools or choice == "none":
            return None
        name = choice.function.name if isinstance(choice, NamedChoice) else None
        return cls(
            [tool.model_dump(exclude_unset=True) for tool in tools],
            schemas_of(tools),
            is_forced=choice == "required" or name is not None,
            forced_name=name,
            max_calls=None if is_parallel else 1,
        )

    def grammar(self, grammars: GrammarMaker) -> Grammar | None:
        """Return what enforces the call; None if it is free.

        Raises:
            InvalidRequestError: a tool's schema cannot be enforced.
        """
        if not self.is_forced:
            return None
        if self.forced_name is not None:
            return grammars.json_schema(self.schemas[self.forced_name], param="tools")
        return grammars.json_schema(calls_schema(self.schemas, max_calls=self.max_calls), param="tools")


def schemas_of(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the schema of each tool's arguments by its name.

    Raises:
        InvalidRequestError: two have one name.
    """
    schemas = {tool.function.name: tool.function.parameters or {"type": "object"} for tool in tools}
    if len(schemas) < len(tools):
        raise InvalidRequestError("Two tools have the same name.", param="tools")
    return schemas


def check_choice(choice: ToolChoice | None, tools: Sequence[Tool] | None) -> None:
    """Raise InvalidRequestError if `choice` asks for a tool that is not there."""
    if choice in (None, "none", "auto"):
        return
    if not tools:
        raise InvalidRequestError("'tool_choice' needs 'tools'.", param="tool_choice")
    if isinstance(choice, NamedChoice) and all(choice.function.name != tool.function.name for tool in tools):
        raise InvalidRequestError("'tool_choice' names a function that is not in 'tools'.", param="tool_choice")


def calls_schema(schemas: Mapping[str, Any], *, max_calls: int | None) -> dict[str, Any]:
    """Return the schema of an array of calls, at least one."""
    definitions: dict[str, Any] = {}
    options = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": _hoist(schema, name, definitions)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, schema in schemas.items()
    ]
    array: dict[str, Any] = {"type": "array", "items": {"anyOf": options}, "minItems": 1}
    if max_calls is not None:
        array["maxItems"] = max_calls
    if definitions:
        array["$defs"] = definitions
    return array


def _hoist(schema: Any, prefix: str, definitions: dict[str, Any]) -> Any:
    """Return `schema` with its definitions moved to the root, under names of their own."""
    if not isinstance(schema, dict):
        return schema
    own = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema.get(key), dict)}
    for key, entries in own.items():
        for name, part in entries.items():
            definitions[_hoisted_name(prefix, key, name)] = _repoint(part, prefix)
    return _repoint({key: part for key, part in schema.items() if key not in own}, prefix)


def _hoisted_name(prefix: str, key: str, name: str) -> str:
    return f"{prefix}.{key}.{name}".replace("/", "_")


def _repoint(part: Any, prefix: str) -> Any:
    """Return a copy in which references lead to the definitions' new places."""
    if isinstance(part, list):
        return [_repoint(item, prefix) for item in part]
    if not isinstance(part, dict):
        return part
    copy = {key: _repoint(value, prefix) for key, value in part.items()}
    match str(part.get("$ref", "")).split("/", 2):
        case ["#", ("$defs" | "definitions") as key, name]:
            copy["$ref"] = f"#/$defs/{_hoisted_name(prefix, key, name)}"
    return copy


def with_tools(messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose system message tells of the tools, for a template that does not."""
    first, text = messages[0], tools_as_text(tools)
    if first["role"] == "system" and isinstance(first["content"], str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def tools_as_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return what a system message says of the tools, for a model whose template does not.

    It is the wording that Hermes and Qwen2.5 were trained on.
    """
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{lines}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within <tool_call></tool_call> "
        'XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    )
