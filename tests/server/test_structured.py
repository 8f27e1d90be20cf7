"""What `response_format` and `structured_outputs` are turned into."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ftserve.engine.checkpoint import Checkpoint, resolve
from ftserve.engine.errors import InvalidRequestError
from ftserve.engine.grammar import GrammarCompiler
from ftserve.server.structured import ResponseFormat, StructuredOutputs, compile_structure
from tests.server.serving import MODEL, RunningServer, chat_body, completion_body


@pytest.fixture(scope="module")
def grammars() -> Iterator[GrammarCompiler]:
    checkpoint = Checkpoint.read(resolve(MODEL))
    compiler = GrammarCompiler(
        checkpoint.tokenizer_json, vocab_size=checkpoint.vocab_size, eos_token_ids=checkpoint.eos_token_ids
    )
    yield compiler
    compiler.close()


NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TAGS = {"structures": [{"begin": "<f=a>", "schema": NUMBER, "end": "</f>"}], "triggers": ["<f="]}


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"x": [1]}', "[1]"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBER}}}, '{"n":5}', "{}"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "anything"}}}, "[1]", "x"),
        ({"response_format": {"type": "structural_tag"} | TAGS}, 'so <f=a>{"n": 5}</f>', "so <f=b>"),
        ({"structured_outputs": {"json": NUMBER}}, '{"n": 5}', "{}"),
        ({"structured_outputs": {"json": json.dumps(NUMBER)}}, '{"n": 5}', "{}"),
        ({"structured_outputs": {"json_object": True}}, "{}", "[]"),
        ({"structured_outputs": {"regex": "[a-c]{2}"}}, "ab", "ad"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red", "blue"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]+/'}}, "x12", "y"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]+'}}, "x12", "y"),
        ({"structured_outputs": {"structural_tag": TAGS}}, 'so <f=a>{"n": 5}</f> then', "so <f=a>{}"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGS)}}, "just text", "so <f=b>"),
    ],
)
def test_each_kind(grammars: GrammarCompiler, fields: dict[str, Any], good: str, bad: str) -> None:
    grammar = compile_structure(
        ResponseFormat.model_validate(fields["response_format"]) if "response_format" in fields else None,
        StructuredOutputs.model_validate(fields["structured_outputs"]) if "structured_outputs" in fields else None,
        grammars,
    )
    assert grammar is not None
    for text, is_good in ((good, True), (bad, False)):
        matcher, token_ids = grammar.matcher.deep_copy(), grammars._load_tokenizer().tokenize_str(text)
        assert (matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()) is is_good


def test_text_asks_for_nothing(grammars: GrammarCompiler) -> None:
    assert compile_structure(None, None, grammars) is None
    assert compile_structure(ResponseFormat(type="text"), None, grammars) is None


def test_one_structure_at_a_time(grammars: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match="not both"):
        compile_structure(ResponseFormat(type="json_object"), StructuredOutputs(regex="a"), grammars)


def test_structured_requests_are_answered(null_server: RunningServer) -> None:
    """The null engine has its own text, but everything before it is real."""
    wanted: dict[str, Any] = {
        "response_format": {"type": "json_object"},
        "allowed_token_ids": [5],
        "bad_words": ["a b"],
    }
    assert null_server.http.post("/v1/chat/completions", json=chat_body(**wanted)).status_code == 200
    wanted = {"structured_outputs": {"regex": "a+"}, "n": 3, "stream": True}
    assert null_server.http.post("/v1/completions", json=completion_body(**wanted)).status_code == 200


def test_hostile_structures_leave_the_server_unharmed(null_server: RunningServer) -> None:
    """Case 13."""
    properties = {f"property_{k}": {"type": "string"} for k in range(8000)}
    chain: dict[str, Any] = {f"d{k}": {"$ref": f"#/$defs/d{k + 1}"} for k in range(20_000)}
    hostile: list[tuple[dict[str, Any], int]] = [
        ({"regex": "(a+)+b" * 40}, 200),
        ({"json": {"enum": [f"value {k}" for k in range(10_000)]}}, 200),
        ({"json": {"type": "object", "properties": properties}}, 400),
        ({"json": {"$ref": "#/$defs/d0", "$defs": chain | {"d20000": {}}}}, 400),
        ({"json": {"type": "array", "items": {"pattern": "(a+)+b"}, "minItems": 1000, "maxItems": 10**6}}, 400),
        ({"json": {"$ref": "#/$defs/nope"}}, 400),
        ({"grammar": "start: r0\n" + "".join(f'r{k}: r{k + 1} | "x"\n' for k in range(20_000)) + 'r20000: "a"'}, 400),
    ]
    statuses: dict[int, int] = {}

    def ask(number: int, structure: dict[str, Any]) -> None:
        body = completion_body(structured_outputs=structure)
        statuses[number] = null_server.http.post("/v1/completions", json=body, timeout=60).status_code

    threads = [threading.Thread(target=ask, args=(k, structure)) for k, (structure, _) in enumerate(hostile)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert null_server.http.get("/health").status_code == 200
        threads[-1].join(0.05)
    assert statuses == {k: status for k, (_, status) in enumerate(hostile)}


def test_text_does_not_wait_for_grammars(start_server: Callable[..., RunningServer]) -> None:
    server = start_server("--preprocess-threads", "1")
    ended: list[str] = []

    def ask(name: str, **fields: Any) -> None:
        server.http.post("/v1/completions", json=completion_body(**fields), timeout=60)
        ended.append(name)

    ask("first", structured_outputs={"regex": "a"})  # loads what grammars need
    slow = {"json": {"type": "integer", "multipleOf": 1_000_007}}  # refused when its half second is used up
    thread = threading.Thread(target=ask, args=("slow",), kwargs={"structured_outputs": slow})
    thread.start()
    while server.metric("http_requests_inside") < 1 and thread.is_alive():
        pass
    ask("text")
    thread.join()
    assert ended == ["first", "text", "slow"]
