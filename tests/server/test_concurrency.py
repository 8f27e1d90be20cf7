"""Many requests of all kinds at once: each gets its own answer, to the letter."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable

import pytest

from ftserve.engine.null import NULL_TEXT
from tests.server.serving import RunningServer, chat_body, completion_body, wait_until
from tests.server.sockets import Answer, Connection

NUM_CONNECTIONS = 48
REQUESTS_EACH = 40
LONGEST = 60  # tokens
STOP = " harbour"


def text_and_reasons(answer: Answer, n: int) -> tuple[list[str], list[str]]:
    """Return the text and the finish reason of each choice, streamed or not."""
    if answer.headers["content-type"].startswith("application/json"):
        chunks = [answer.json()]
    else:
        *events, end = answer.events()
        assert end == "[DONE]"
        chunks = [json.loads(event) for event in events]
    texts, reasons = [""] * n, [""] * n
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        part = choice.get("message") or choice.get("delta") or {"content": choice.get("text", "")}
        texts[choice["index"]] += part.get("content", "")
        reasons[choice["index"]] += choice["finish_reason"] or ""
    return texts, reasons


async def ask_one(connection: Connection, texts: list[str], rng: random.Random) -> None:
    """Send one request of a random kind and check its answer; `texts` are the whole texts by number of tokens."""
    max_tokens, n = rng.randint(1, LONGEST), rng.choice([1, 1, 2, 5])
    fields: dict[str, object] = {"max_tokens": max_tokens, "n": n, "stream": rng.random() < 0.5}
    expected, reason = texts[max_tokens], "length"
    if rng.random() < 0.3:
        fields["stop"] = ["never in the text", STOP]
        if STOP in expected:
            expected, reason = expected.partition(STOP)[0], "stop"
    is_chat = rng.random() < 0.5
    if rng.random() < 0.1:
        answer = await connection.ask("/v1/completions", completion_body(temperature=9))
        assert answer.status == 400
    body = chat_body(**fields) if is_chat else completion_body(**fields)  # type: ignore[arg-type]
    answer = await connection.ask("/v1/chat/completions" if is_chat else "/v1/completions", body)
    assert answer.status == 200
    assert text_and_reasons(answer, n) == ([expected] * n, [reason] * n)


@pytest.mark.parametrize("scheduler", ["direct", "asyncio"])
def test_each_of_many_mixed_requests_gets_its_own_answer(
    start_server: Callable[..., RunningServer], scheduler: str
) -> None:
    server = start_server("--http-scheduler", scheduler, "--max-num-seqs", "20")
    texts = [""] + [server.complete(max_tokens=k).json()["choices"][0]["text"] for k in range(1, LONGEST + 1)]
    assert all(NULL_TEXT.startswith(text) for text in texts)

    async def ask_many(seed: int) -> None:
        rng = random.Random(seed)
        async with await Connection.open(server.port) as connection:
            for _ in range(REQUESTS_EACH):
                await ask_one(connection, texts, rng)

    async def all_connections() -> None:
        await asyncio.gather(*(ask_many(seed) for seed in range(NUM_CONNECTIONS)))

    asyncio.run(all_connections())
    wait_until(server.is_idle, "all are out")
