"""What models write, and what it means."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

# ruff: noqa: RUF001 - DeepSeek's markers are written with full-width bars

SCHEMAS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "celsius": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "note": {"type": ["string", "null"]},
        },
    },
    "get_time": {"type": "object", "properties": {}},
}
ROME: dict[str, Any] = {"city": 'Rome "é" {x} \\n', "days": 3, "celsius": True, "tags": ["a", "b\n]"]}
ROME_JSON = json.dumps(ROME, ensure_ascii=False)


@dataclass(frozen=True)
class Sample:
    parser: str
    text: str
    calls: list[tuple[str, dict[str, Any]]]
    content: str = ""
    reasoning: str = ""


WEATHER = [("get_weather", ROME)]
BOTH = [*WEATHER, ("get_time", {})]
SIMPLE = {"city": "San Francisco\nCA", "days": -2, "note": "null?"}

SAMPLES = [
    Sample("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME_JSON}}}\n</tool_call>', WEATHER),
    Sample(
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {ROME_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
        BOTH,
        "Let me see.\n",
    ),
    Sample(
        "hermes", '<tool_call>{"arguments": {"days": 1}, "name": "get_time"}</tool_call>', [("get_time", {"days": 1})]
    ),
    Sample("hermes", '<tool_call>{"name": "get_time", "arguments": null}</tool_call>', [("get_time", {})]),
    Sample(
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(ROME_JSON)}}}</tool_call>',
        WEATHER,
    ),
    Sample("hermes", "a < b and <tool_ is no call, nor is <tool", [], "a < b and <tool_ is no call, nor is <tool"),
    Sample("hermes", "See <tool_call>what</tool_call> I mean", [], "See <tool_call>what</tool_call> I mean"),
    Sample(
        "hermes", '\n<tool_call>{"name": "get_time", "arguments": {}}</tool_call> Done.', [("get_time", {})], " Done."
    ),
    Sample(
        "qwen3_coder",
        "Sure.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nSan Francisco\nCA\n</parameter>\n"
        "<parameter=days>\n-2\n</parameter>\n<parameter=note>\nnull?\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        [("get_weather", SIMPLE), ("get_time", {})],
        "Sure.\n",
    ),
    Sample(
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\n\n</parameter>\n<parameter=celsius>\nTrue\n</parameter>\n"
        '<parameter=tags>\n["x"]\n</parameter>\n<parameter=other>\nC:\\n\n</parameter>\n</function>',
        [("get_weather", {"city": "", "celsius": True, "tags": ["x"], "other": "C:\\n"})],
    ),
    Sample(
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>San Francisco\nCA</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>-2</arg_value>\n<arg_key>note</arg_key>\n<arg_value>null?</arg_value>\n"
        "</tool_call>\n<tool_call>get_time\n</tool_call>",
        [("get_weather", SIMPLE), ("get_time", {})],
    ),
    Sample("glm45", "<tool_call>get_time</tool_call>", [("get_time", {})]),
    Sample("llama3_json", f'{{"name": "get_weather", "parameters": {ROME_JSON}}}', WEATHER),
    Sample(
        "llama3_json",
        f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {ROME_JSON}}}; '
        '{"name": "get_time", "parameters": {}}',
        BOTH,
    ),
    Sample("llama3_json", '{"name": "nobody", "parameters": {}}', [], '{"name": "nobody", "parameters": {}}'),
    Sample("llama3_json", '{"answer": 42}', [], '{"answer": 42}'),
    Sample("llama3_json", "Hello {", [], "Hello {"),
    Sample(
        "pythonic",
        "[get_weather(city='Rome \"é\" {x} \\\\n', days=3, celsius=True, tags=['a', 'b\\n]']), get_time()]",
        BOTH,
    ),
    Sample("pythonic", "<|python_start|>[get_time()]<|python_end|>", [("get_time", {})]),
    Sample("pythonic", "[1, 2] is a list", [], "[1, 2] is a list"),
    Sample("pythonic", "Hello [get_time()]", [], "Hello [get_time()]"),
    Sample(
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ROME_JSON}}}, '
        '{"name": "get_time", "arguments": {}}]',
        BOTH,
    ),
    Sample("mistral", f"Hm.[TOOL_CALLS]get_weather[ARGS]{ROME_JSON}[TOOL_CALLS]get_time[ARGS]{{}}", BOTH, "Hm."),
    Sample("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{ROME_JSON}", WEATHER),
    Sample("mistral", f"[TOOL_CALLS]get_weather{ROME_JSON}", WEATHER),
    Sample(
        "deepseek",
        f"Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ROME_JSON}\n```"
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_time\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        BOTH,
        "Well.",
    ),
    Sample(
        "deepseek",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ROME_JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>get_time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        BOTH,
    ),
    Sample(
        "harmony",
        "<|channel|>analysis<|message|>Think <hard>.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{ROME_JSON}<|call|>",
        WEATHER,
        "I look.",
        "Think <hard>.",
    ),
    Sample(
        "harmony",
        "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant to=functions.get_time<|channel|>commentary json"
        "<|message|>{}<|call|>",
        [("get_time", {})],
        "",
        "Hm",
    ),
    Sample("harmony", "<|channel|>final<|message|>Hello.<|return|>", [], "Hello."),
    Sample("harmony", "No channel at all", [], "No channel at all"),
]
