"""Prints docs/api.md from the models: `python -m ftserve.server.reference > docs/api.md`. A test compares them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from ftserve.server.openapi import GETS, POSTS, make_openapi
from ftserve.server.wire import NOT_YET, ChatRequest, CompletionRequest, GenerationFields

IGNORED = {  # in chats and completions: fields of OpenAI's and others' that change nothing here
    "user": "nobody is told apart by it",
    "metadata": "nothing is stored",
    "store": "nothing is stored",
    "service_tier": "there is one",
    "safety_identifier": "nobody is told apart by it",
    "prompt_cache_key": "prefixes are found by their content",
    "modalities": "answers are text",
    "prediction": "it would only save time",
}
REFUSED = {
    "suffix": "text is only continued",
    "best_of": "unless it equals `n`",
    **dict.fromkeys(NOT_YET, "unless it asks for nothing"),
}
PARTIAL = {  # what a table's line says besides
    "chat_template": "refused unless the operator allows it",
    "continue_final_message": "not with `add_generation_prompt`",
    "prompt_logprobs": "not with `stream`",
    "stream_options": "only with `stream`",
    "top_logprobs": "only with `logprobs`",
    "functions": "refused unless it asks for nothing",
    "audio": "refused unless it asks for nothing",
    "suffix": "refused",
    "best_of": "refused unless it equals `n`",
}


def lines() -> Iterator[str]:
    """Yield the lines of docs/api.md."""
    api = make_openapi()
    schemas = api["components"]["schemas"]
    yield "# API"
    yield ""
    yield "Made by `python -m ftserve.server.reference > docs/api.md` from the models that parse requests."
    yield ""
    yield "A field that is not listed is ignored. A value that is out of range or of another type gets 400;"
    yield "`null` asks for the default. Errors have OpenAI's shape, with `message`, `type`, `param` and `code`."
    for path, post in POSTS.items():
        yield from (
            "",
            f"## POST {path}",
            "",
            f"{post.summary}{'; `stream` for events as they come' * post.streams}.",
            "",
        )
        yield from _table(schemas[post.model.__name__])
        if post.model in (ChatRequest, CompletionRequest):
            yield from (
                "",
                "Accepted and ignored: " + "; ".join(f"`{name}`, {why}" for name, why in IGNORED.items()) + ".",
            )
    yield from ("", "## Parts of these", "")
    for name in sorted(schemas.keys() - {post.model.__name__ for post in POSTS.values()} - {"Error"}):
        if "properties" in schemas[name]:
            yield from (f"### {name}", "")
            yield from _table(schemas[name])
            yield ""
    yield from ("## GET", "", "| Path | |", "|---|---|")
    for path, summary in GETS.items():
        yield f"| `{path}` | {summary} |"
    yield "| `/openapi.json`, `/docs`, `/` | This for programs, for people, and links |"


def _table(schema: Mapping[str, Any]) -> Iterator[str]:
    yield "| Field | Type | Default | |"
    yield "|---|---|---|---|"
    for name, field in schema["properties"].items():
        default = "required" if name in schema.get("required", ()) else f"`{json.dumps(field.get('default'))}`"
        yield f"| `{name}` | {_type(field)} | {default} | {PARTIAL.get(name, '')} |"


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_type(option) for option in options if option.get("type") != "null"))
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return " or ".join(f"`{json.dumps(value)}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}{_length(schema, 'Items')}"
    return f"{schema.get('type', 'any')}{_range(schema)}{_length(schema, 'Length')}"


def _range(schema: Mapping[str, Any]) -> str:
    low = [f"≥ {schema['minimum']}"] if "minimum" in schema else []
    low += [f"> {schema['exclusiveMinimum']}"] if "exclusiveMinimum" in schema else []
    high = [f"≤ {schema['maximum']}"] if "maximum" in schema else []
    high += [f"< {schema['exclusiveMaximum']}"] if "exclusiveMaximum" in schema else []
    return f" {', '.join(low + high)}" if low + high else ""


def _length(schema: Mapping[str, Any], of: str) -> str:
    low, high = schema.get(f"min{of}"), schema.get(f"max{of}")
    what = "entries" if of == "Items" else "characters"
    parts = [f"at least {low}"] if low else []
    parts += [f"at most {high}"] if high else []
    return f" ({' and '.join(parts)} {what})" if parts else ""


assert not IGNORED.keys() & GenerationFields.model_fields.keys(), "what is ignored has no field"

if __name__ == "__main__":
    sys.stdout.write("\n".join(lines()) + "\n")
