"""The structure that a request wants its output to have: `response_format` and `structured_outputs`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ftserve.engine.errors import InvalidRequestError
from ftserve.engine.grammar import Grammar, GrammarMaker, schema_source

_MAX_GBNF_CHARS = 2**16  # its translation to Lark's language is Python's work


class JsonSchema(BaseModel):
    """OpenAI's wrapping of a schema. Every schema is held to strictly, whether `strict` is asked for or not."""

    model_config = ConfigDict(extra="ignore", strict=True)

    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class Tag(BaseModel):
    """One kind of structured part inside free text."""

    model_config = ConfigDict(extra="ignore", strict=True)

    begin: Annotated[str, Field(min_length=1)]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    end: Annotated[str, Field(min_length=1)]


class StructuralTags(BaseModel):
    """Free text in which a trigger forces one of the tags that begin with it."""

    model_config = ConfigDict(extra="ignore", strict=True)

    structures: Annotated[list[Tag], Field(min_length=1, max_length=128)]
    triggers: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=128)]


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`, and vLLM's type "structural_tag"."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    structures: list[Tag] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(BaseModel):
    """vLLM's `structured_outputs`: exactly one of its fields is given."""

    model_config = ConfigDict(extra="ignore", strict=True)

    json_: Annotated[str | dict[str, Any] | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | StructuralTags | None = None


def compile_structure(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None, grammars: GrammarMaker
) -> Grammar | None:
    """Return the grammar that a request asks for, if it asks for any.

    Raises:
        InvalidRequestError: naming the field.
    """
    wants_format = response_format is not None and response_format.type != "text"
    if structured is not None:
        if wants_format:
            raise InvalidRequestError(
                "Give 'response_format' or 'structured_outputs', not both.", param="structured_outputs"
            )
        return _compile_structured(structured, grammars)
    return _compile_format(response_format, grammars) if wants_format and response_format is not None else None


def _compile_format(wanted: ResponseFormat, grammars: GrammarMaker) -> Grammar:
    if wanted.type == "json_object":
        return grammars.json_object()
    if wanted.type == "json_schema":
        if wanted.json_schema is None:
            raise InvalidRequestError("The format 'json_schema' needs a 'json_schema'.", param="response_format")
        schema = wanted.json_schema.schema_
        return grammars.json_schema({} if schema is None else schema, param="response_format.json_schema.schema")
    if not wanted.structures or not wanted.triggers:
        raise InvalidRequestError(
            "The format 'structural_tag' needs 'structures' and 'triggers'.", param="response_format"
        )
    tags = StructuralTags.model_construct(structures=wanted.structures, triggers=wanted.triggers)
    return _compile_tags(tags, grammars, param="response_format")


def _compile_structured(wanted: StructuredOutputs, grammars: GrammarMaker) -> Grammar:
    given = [
        name
        for name in ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")
        if getattr(wanted, name) not in (None, False)
    ]
    if len(given) != 1:
        raise InvalidRequestError(
            "Give exactly one of json, regex, choice, grammar, json_object and structural_tag.",
            param="structured_outputs",
        )
    param = f"structured_outputs.{given[0].rstrip('_')}"
    if wanted.json_ is not None:
        return grammars.json_schema(_parse(wanted.json_, param), param=param)
    if wanted.regex is not None:
        return grammars.regex(wanted.regex, param=param)
    if wanted.choice is not None:
        return grammars.choice(wanted.choice, param=param)
    if wanted.grammar is not None:
        return grammars.lark(_to_lark(wanted.grammar, param), param=param)
    if wanted.structural_tag is not None:
        tags = wanted.structural_tag
        if isinstance(tags, str):
            try:
                tags = StructuralTags.model_validate(_parse(tags, param))
            except ValueError:
                raise InvalidRequestError("It needs 'structures' and 'triggers'.", param=param) from None
        return _compile_tags(tags, grammars, param=param)
    return grammars.json_object()


def _parse(schema: str | dict[str, Any], param: str) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        raise InvalidRequestError("This is not valid JSON.", param=param) from None
    if not isinstance(parsed, dict | bool):
        raise InvalidRequestError("A schema is an object.", param=param)
    return parsed


def _to_lark(grammar: str, param: str) -> str:
    """Return a grammar in Lark's language, translated if it is in llama.cpp's (GBNF)."""
    if "::=" not in grammar:
        return grammar
    from llguidance.gbnf_to_lark import any_to_lark

    if len(grammar) > _MAX_GBNF_CHARS:
        raise InvalidRequestError("This grammar cannot be used: it is too large or too complex.", param=param)
    try:
        return any_to_lark(grammar)
    except Exception:  # noqa: BLE001 - a parser that raises what it likes, RecursionError too
        raise InvalidRequestError("This grammar cannot be used: it is not valid GBNF.", param=param) from None


def _compile_tags(tags: StructuralTags, grammars: GrammarMaker, *, param: str) -> Grammar:
    """Compile free text with tags: text runs up to a trigger, which one of the tags has to go on from."""
    rules = [f"start: ({' | '.join(f'tag{k}' for k in range(len(tags.structures)))})* TEXT", r"TEXT: /(.|\n)*/"]
    for k, tag in enumerate(tags.structures):
        trigger = next((trigger for trigger in tags.triggers if tag.begin.startswith(trigger)), None)
        if trigger is None:
            raise InvalidRequestError("Each structure has to begin with one of the triggers.", param=param)
        rest = json.dumps(tag.begin[len(trigger) :]) if len(tag.begin) > len(trigger) else ""
        rules.append(f"trigger{k}[lazy]: /(.|\\n)*/ {json.dumps(trigger)}")
        rules.append(f"tag{k}: trigger{k} {rest} %json {schema_source(tag.schema_, param=param)} {json.dumps(tag.end)}")
    return grammars.lark("\n".join(rules), param=param, what="set of tags")
