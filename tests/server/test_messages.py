"""Messages become what templates want."""

from __future__ import annotations

from typing import Any

import pytest

from ftserve.preprocess.chat_traits import ChatTraits
from ftserve.server.messages import for_template
from ftserve.server.parsers import registry
from ftserve.server.tools import calls_schema

CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
OBJECTS = CALLS + "{{ a | tojson }}{% endfor %}{% endfor %}"
STRINGS = CALLS + "{{ '' + a }}{% endfor %}{% endfor %}"
EITHER = CALLS + "{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}{% endfor %}{% endfor %}"


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(("source", "wants_objects"), [(OBJECTS, True), (STRINGS, False), (EITHER, True), ("", True)])
def test_a_template_tells_what_arguments_it_wants(source: str, wants_objects: bool) -> None:
    assert ChatTraits.of(source, {}).wants_objects == wants_objects


@pytest.mark.parametrize("given", ['{"a": 1}', {"a": 1}])
def test_arguments_are_given_as_wanted(given: object) -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [call(given)]}]
    for traits, wanted in ((ChatTraits(), {"a": 1}), (ChatTraits(wants_objects=False), '{"a": 1}')):
        (message,) = for_template(messages, traits)
        assert message["content"] == ""
        assert message["tool_calls"][0]["function"]["arguments"] == wanted


def test_arguments_that_are_no_json_are_kept() -> None:
    (message,) = for_template([{"role": "assistant", "tool_calls": [call('{"a":')]}], ChatTraits())
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a":'


def test_a_developer_is_a_system_where_the_template_does_not_know_it() -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert for_template(messages, ChatTraits())[0]["role"] == "system"
    assert for_template(messages, ChatTraits(knows_developers=True))[0]["role"] == "developer"


def test_thoughts_are_under_the_names_that_templates_use() -> None:
    (message,) = for_template([{"role": "assistant", "content": "x", "reasoning": "why"}], ChatTraits())
    assert (message["reasoning_content"], message["thinking"]) == ("why", "why")


@pytest.mark.parametrize(
    ("sign", "name"),
    [
        ("<function=", "qwen3_coder"),
        ("<tool_call>", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|channel|>analysis", "harmony"),
        ("<tool_call><arg_key>", "glm45"),
        ("plain", None),
    ],
)
def test_a_template_tells_the_format_of_calls(sign: str, name: str | None) -> None:
    assert registry.detect(f"{{{{ '{sign}' }}}}", registry.TOOL_PARSERS) == name


def test_definitions_of_several_tools_do_not_collide() -> None:
    def schema(kind: str) -> dict[str, Any]:
        return {"$defs": {"X": {"type": kind}}, "properties": {"x": {"$ref": "#/$defs/X"}}}

    found = calls_schema({"f": schema("string"), "g": schema("integer")}, max_calls=2)
    for option, kind in zip(found["items"]["anyOf"], ("string", "integer"), strict=True):
        path = option["properties"]["arguments"]["properties"]["x"]["$ref"].removeprefix("#/$defs/")
        assert found["$defs"][path] == {"type": kind}
    assert (found["minItems"], found["maxItems"]) == (1, 2)
