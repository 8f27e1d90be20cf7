"""Random JSON schemas that allow few and short values, and a check of values that shares no code with llguidance."""

from __future__ import annotations

import json
import random
import re
from typing import Any

NAMES = ("id", "name", "kind", "size", "on", "at", "next", "a b", "{}")


def random_schema(rng: random.Random, odd: str, depth: int = 2) -> dict[str, Any]:
    """Return a schema; `depth` is how many objects or arrays may lie in one another, `odd` a character in it."""
    kinds = ["string", "integer", "boolean", "null", "enum", "pattern", "union", "const"]
    kind = rng.choice([*kinds, "object", "object", "object", "array", "array"] if depth else kinds)
    if kind == "string":
        return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(2, 6)}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", "^\\d{1,3}-x$", "^(yes|no)$"])}
    if kind == "integer":
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}
    if kind == "enum":
        return {"enum": rng.sample(["a", 'q"', f"n{odd}e", 1, -2.5, True, None, []], rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["x", 7, None, {"k": [1]}])}
    if kind == "union":
        return {"anyOf": [random_schema(rng, odd, 0), random_schema(rng, odd, 0)]}
    if kind == "array":
        fewest = rng.randint(0, 1)
        items = random_schema(rng, odd, depth - 1)
        return {"type": "array", "items": items, "minItems": fewest, "maxItems": fewest + rng.randint(0, 2)}
    if kind == "object":
        names = rng.sample((*NAMES, odd), rng.randint(1, 3))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, odd, depth - 1) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
            "additionalProperties": False,
        }
    return {"type": kind}


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Tell whether `value` is one that a schema of `random_schema` allows."""
    if "anyOf" in schema:
        return any(is_valid(value, option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        allowed = schema.get("enum", [schema.get("const")])
        return any(type(value) is type(one) and value == one for one in allowed)
    match schema["type"]:
        case "string":
            return (
                isinstance(value, str)
                and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 99)
                and re.search(schema.get("pattern", ""), value) is not None
            )
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(is_valid(item, schema["items"]) for item in value)
            )
    properties = schema["properties"]
    return (
        isinstance(value, dict)
        and value.keys() <= properties.keys()
        and all(name in value for name in schema["required"])
        and all(is_valid(member, properties[name]) for name, member in value.items())
    )


def follows(text: str, schema: dict[str, Any]) -> bool:
    """Tell whether `text` is JSON that `schema` allows."""
    try:
        return is_valid(json.loads(text), schema)
    except ValueError:
        return False
