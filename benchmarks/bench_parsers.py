"""What finding tool calls and thoughts costs an output thread, in µs of CPU a token.

    PYTHON_GIL=0 .venv/bin/python -m benchmarks.bench_parsers [--calls N]

Each format's text is a sentence and calls with long arguments, tokenized by the default model's tokenizer and pushed
token by token, as a stream does. "parser" is what the parser alone adds: the same texts pushed into it, detokenized
beforehand.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

from tokenizers import Tokenizer

from ftserve.engine.checkpoint import resolve
from ftserve.engine.types import GenerationRequest, SamplingParams, TokenEvent
from ftserve.preprocess.text import make_detokenizer
from ftserve.preprocess.vocabulary import build_vocabulary
from ftserve.server.config import DEFAULT_MODEL
from ftserve.server.parsers.registry import TOOL_PARSERS
from ftserve.server.parsers.think import ThinkParser
from ftserve.server.rich import OutputParser, RichOptions, RichText

# ruff: noqa: RUF001 - DeepSeek's markers are written with full-width bars

ROUNDS = 7
PROSE = "The answer took a while to arrive, and nobody in the room had expected it to be so short. " * 4
ARGUMENTS = {"city": "San Francisco", "note": PROSE, "days": 3, "tags": ["a", "b", "c"] * 8}
SCHEMA = {"properties": {"city": {"type": "string"}, "note": {"type": "string"}, "days": {"type": "integer"}}}


def texts() -> dict[str, str]:
    """Return one call in each format."""
    arguments = json.dumps(ARGUMENTS)
    parts = ARGUMENTS.items()
    python = ", ".join(f"{key}={value!r}" for key, value in parts)
    bare = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in parts]
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in bare)
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in bare)
    return {
        "hermes": f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>\n',
        "qwen3_coder": f"<tool_call>\n<function=f>\n{tags}</function>\n</tool_call>\n",
        "glm45": f"<tool_call>f\n{pairs}</tool_call>\n",
        "llama3_json": f'{{"name": "f", "parameters": {arguments}}}; ',
        "pythonic": f"[f({python})]",
        "mistral": f"[TOOL_CALLS]f[ARGS]{arguments}",
        "deepseek": f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
        "harmony": f"<|channel|>commentary to=functions.f<|message|>{arguments}<|call|><|start|>assistant",
    }


def best(run: Callable[[], None], count: int) -> float:
    """Return the least µs of CPU that one of `count` things took, over some rounds."""
    found = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        run()
        found.append(time.thread_time() - began)
    return 1e6 * min(found) / count


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--calls", type=int, default=8, help="calls in one output")
    num_calls = options.parse_args().calls
    tokenizer = Tokenizer.from_file(str(resolve(DEFAULT_MODEL) / "tokenizer.json"))
    vocabulary = build_vocabulary(tokenizer)
    request = GenerationRequest(
        request_id="", index=0, prompt_ids=(), sampling=SamplingParams(max_tokens=1), lane=0, route=None
    )
    event = TokenEvent(request, ())
    makers: dict[str, tuple[Callable[[], OutputParser] | None, str]] = {"plain text": (None, PROSE * 8)}
    makers["prose, hermes"] = (TOOL_PARSERS["hermes"].prepare({"f": SCHEMA}), PROSE * 8)
    makers["thought"] = (lambda: ThinkParser("<think>", "</think>", is_open=True), PROSE * 8)
    for name, text in texts().items():
        repeats = 1 if name == "pythonic" else num_calls
        makers[name] = (TOOL_PARSERS[name].prepare({"f": SCHEMA}), text * repeats)
    print(f"{'':16}{'tokens':>8}{'whole slow path':>18}{'parser':>10}   µs a token")
    for name, (make, text) in makers.items():
        ids = [(token_id,) for token_id in tokenizer.encode(text).ids]
        detokenizer = make_detokenizer(vocabulary)
        pieces = [detokenizer.push(one) for one in ids]

        def push_all(make: Callable[[], OutputParser] | None = make, ids: list[tuple[int]] = ids) -> None:
            rich = RichText(RichOptions(make), make_detokenizer(vocabulary), None)
            for one in ids:
                rich.push(one, event)
                rich.take()
            rich.finish()

        def parse_all(make: Callable[[], OutputParser] | None = make, pieces: list[str] = pieces) -> None:
            if make is not None:
                parser = make()
                for piece in pieces:
                    parser.push(piece)
                parser.flush()

        print(f"{name:16}{len(ids):8}{best(push_all, len(ids)):18.2f}{best(parse_all, len(ids)):10.2f}")


if __name__ == "__main__":
    main()
