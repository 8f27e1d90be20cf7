"""Compiling constraints: what they accept, what is refused, and that nothing hostile gets through."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from ftserve.engine.checkpoint import Checkpoint, resolve
from ftserve.engine.errors import EngineError, InvalidRequestError, OverloadedError, RequestCancelledError
from ftserve.engine.grammar import Grammar, GrammarCompiler, UnknownGrammarError, schema_source


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    checkpoint = Checkpoint.read(resolve("smollm2-135m-instruct"))
    made = GrammarCompiler(
        checkpoint.tokenizer_json, vocab_size=checkpoint.vocab_size, eos_token_ids=checkpoint.eos_token_ids
    )
    yield made
    made.close()


@pytest.fixture(scope="module")
def accepts(compiler: GrammarCompiler) -> Callable[[Grammar, str], bool]:
    """Tell whether a grammar takes a whole text."""

    def accept(grammar: Grammar, text: str) -> bool:
        matcher, token_ids = grammar.matcher.deep_copy(), compiler._load_tokenizer().tokenize_str(text)
        return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())

    return accept


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (PERSON, ['{"name": "Ä", "age": 3}', '{"name":"","age":0}'], ['{"name":"x"}', '{"name":"x","age":-1}', "[]"]),
        ({"enum": ["a", 5, None]}, ['"a"', "5", "null"], ['"b"', "a"]),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, ['"a"', "5"], ["1.5"]),
        ({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, ["[]", "[true, false]"], ["[1]"]),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [{"type": "null"}, PERSON]}}}, ["null"], ["{}"]),
        (True, ["1", '{"a": [1, "x"]}'], ["x"]),
    ],
)
def test_schemas(compiler: GrammarCompiler, accepts: Any, schema: Any, good: list[str], bad: list[str]) -> None:
    grammar = compiler.json_schema(schema)
    assert [accepts(grammar, text) for text in good] == [True] * len(good)
    assert [accepts(grammar, text) for text in bad] == [False] * len(bad)


def test_other_kinds_of_grammar(compiler: GrammarCompiler, accepts: Any) -> None:
    assert accepts(compiler.json_object(), '{"a": {"b": [1, 2.5e3, "\\n é", null]}}')
    assert not accepts(compiler.json_object(), "[1]")
    for pattern in (r"\d{3}-[a-z]+", r"^\d{3}-[a-z]+$"):
        assert accepts(compiler.regex(pattern), "123-abc")
        assert not accepts(compiler.regex(pattern), "x123-abc")
        assert not accepts(compiler.regex(pattern), "\u0661\u0662\u0663-abc")
    assert accepts(compiler.regex("a/b\n[/]"), "a/b\n/")
    choice = compiler.choice(["yes", "no", 'a "quoted" | line\n'])
    assert [accepts(choice, text) for text in ("yes", 'a "quoted" | line\n', "ye", "maybe")] == [1, 1, 0, 0]
    tagged = compiler.lark(f'start: "<call>" body "</call>"\nbody: %json {schema_source(PERSON)}')
    assert accepts(tagged, '<call>{"name": "x", "age": 1}</call>')


def chain(length: int) -> dict[str, Any]:
    defs: dict[str, Any] = {f"d{k}": {"$ref": f"#/$defs/d{k + 1}"} for k in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": defs | {f"d{length}": {"type": "object"}}}


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "array", "uniqueItems": True}, 'keywords that are not supported: "uniqueItems"'),
        ({"type": "nothing"}, "no type nothing"),
        ({"type": "string", "format": "nope"}, "not supported: nope"),
        ({"$ref": "#/$defs/nope"}, "leads nowhere"),
        ({"$ref": "http://127.0.0.1:1/x.json"}, "leads nowhere"),
        ({"$ref": "file:///etc/passwd"}, "leads nowhere"),
        ({"enum": []}, "nothing can satisfy"),
        (False, "nothing can satisfy"),
        ({"type": "string", "pattern": "(?=a)b"}, "look around"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ({"type": "object", "properties": {f"p{k}": {"type": "string"} for k in range(20_000)}}, "too complex"),
        ({"type": "array", "items": {"pattern": "(a+)+b"}, "minItems": 1000, "maxItems": 10**6}, "too complex"),
        ({"type": "integer", "multipleOf": 1_000_007}, "too complex"),
        (chain(20_000), "too complex"),
        ({"title": "x" * 2**20}, "too large"),
    ],
)
def test_bad_schemas_are_refused_with_a_reason(compiler: GrammarCompiler, schema: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        compiler.json_schema(schema, param="response_format")
    assert caught.value.param == "response_format"
    assert "/etc" not in caught.value.message


@pytest.mark.parametrize(
    "source",
    [
        'start: "a" foo',
        "start: " + "(" * 100_000 + '"a"' + ")" * 100_000,
        "start: r0\n" + "\n".join(f'r{k}: r{k + 1} | "x"' for k in range(20_000)) + '\nr20000: "a"',
        "start: <|no_such_token|>",
        "\x00",
        "",
    ],
)
def test_bad_grammars_are_refused(compiler: GrammarCompiler, source: str) -> None:
    with pytest.raises(InvalidRequestError, match="This grammar cannot be used: "):
        compiler.lark(source)


@pytest.mark.parametrize("pattern", ["(a", r"(a)\1", "a^b", "(?<=a)b"])
def test_bad_expressions_are_refused(compiler: GrammarCompiler, pattern: str) -> None:
    with pytest.raises(InvalidRequestError, match="This regular expression cannot be used: "):
        compiler.regex(pattern)


def test_large_and_strange_but_served(compiler: GrammarCompiler, accepts: Any) -> None:
    values = [f"value number {k}" for k in range(10_000)]
    assert accepts(compiler.json_schema({"enum": values}), '"value number 9999"')
    assert accepts(compiler.regex("(a+)+b" * 40), "aab" * 40)
    assert accepts(compiler.json_schema(chain(100)), "{}")


def test_the_same_source_is_compiled_once(compiler: GrammarCompiler) -> None:
    barrier = threading.Barrier(8)
    found: list[Grammar] = []

    def run() -> None:
        barrier.wait()
        found.extend(compiler.regex(f"same{k}") for k in range(3))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 24
    assert len(set(found)) == 3


def test_few_are_remembered(compiler: GrammarCompiler) -> None:
    for k in range(70):
        compiler.regex(f"few{k}")
    assert len(compiler._known) == 64


def test_the_helper_process_is_replaced(compiler: GrammarCompiler) -> None:
    compiler.regex("before")
    process = compiler._sandbox._sandbox._process
    assert process is not None
    os.killpg(process.pid, signal.SIGKILL)  # with the fork that waits for the next question
    process.wait()
    assert compiler.regex("during")
    assert compiler._sandbox._sandbox._process is not process


def test_a_model_without_an_end_has_no_grammars() -> None:
    checkpoint = Checkpoint.read(resolve("smollm2-135m-instruct"))
    compiler = GrammarCompiler(checkpoint.tokenizer_json, vocab_size=49152, eos_token_ids=frozenset())
    with pytest.raises(InvalidRequestError, match="no end of text"):
        compiler.json_object()


def test_a_tokenizer_that_cannot_be_read_is_no_failure_of_ours(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    compiler = GrammarCompiler(tmp_path / "tokenizer.json", vocab_size=10, eos_token_ids=frozenset({1}))
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="no tokenizer"):
            compiler.json_object()


def make_compiler() -> GrammarCompiler:
    checkpoint = Checkpoint.read(resolve("smollm2-135m-instruct"))
    return GrammarCompiler(checkpoint.tokenizer_json, vocab_size=49152, eos_token_ids=checkpoint.eos_token_ids)


def unknown_regex(compiler: GrammarCompiler, pattern: str) -> UnknownGrammarError:
    with pytest.raises(UnknownGrammarError) as caught:
        compiler.known.regex(pattern, param="p")
    return caught.value


def test_who_must_not_wait_has_it_compiled(compiler: GrammarCompiler) -> None:
    told: SimpleQueue[Exception | None] = SimpleQueue()
    compiler.compile_soon(unknown_regex(compiler, "soon"), lambda: True, told.put)
    assert told.get(timeout=60) is None
    assert compiler.known.regex("soon") is compiler.regex("soon")
    compiler.compile_soon(unknown_regex(compiler, "(soon"), lambda: True, told.put)
    error = told.get(timeout=60)
    assert isinstance(error, InvalidRequestError)
    assert error.param == "p"
    compiler.compile_soon(unknown_regex(compiler, "unwanted"), lambda: False, told.put)
    assert told.get(timeout=60) is None
    unknown_regex(compiler, "unwanted")


def test_too_many_that_wait_are_refused_and_all_others_told() -> None:
    compiler, begun, go_on = make_compiler(), threading.Event(), threading.Event()
    told: SimpleQueue[Exception | None] = SimpleQueue()

    def wait() -> bool:
        begun.set()
        return not go_on.wait(60)

    unknown = unknown_regex(compiler, "x")
    compiler.compile_soon(unknown, wait, told.put)
    assert begun.wait(60)
    for _ in range(63):
        compiler.compile_soon(unknown, lambda: True, told.put)
    with pytest.raises(OverloadedError):
        compiler.compile_soon(unknown, lambda: True, told.put)
    closing = threading.Thread(target=compiler.close)
    closing.start()
    while not compiler._sandbox._sandbox._is_closed:
        closing.join(0.01)
    go_on.set()
    closing.join(60)
    reasons = [told.get(timeout=60) for _ in range(64)]
    assert reasons[0] is None
    assert all(isinstance(reason, EngineError) for reason in reasons[1:])
    with pytest.raises(RequestCancelledError):
        compiler.compile_soon(unknown, lambda: True, told.put)
