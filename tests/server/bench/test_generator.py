"""What the load generator makes of answers, and that it is honest about time."""

from __future__ import annotations

import itertools
import threading

import pytest

from ftserve.server.bench.generator import LoadGenerator, Plan
from ftserve.server.bench.results import Record
from ftserve.server.bench.workload import Item
from tests.server.bench.scripted import ScriptedServer, chunked, sse

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":11,"total_tokens":14,"completion_tokens": 3}}\n\n'
DONE = b"data: [DONE]\n\n"
ITEM = Item("text", "/v1/chat/completions", b"{}")


def run(server: ScriptedServer, plan: Plan, item: Item = ITEM) -> list[Record]:
    return LoadGenerator("127.0.0.1", server.port, itertools.repeat(item), plan).run()


STREAM = chunked(sse("", "one"), sse(" two"), sse(" three"), USAGE + DONE)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_a_stream_is_understood_however_it_is_cut(size: int) -> None:
    pieces = [STREAM[k : k + size] for k in range(0, len(STREAM), size)]
    with ScriptedServer(pieces) as server:
        records = run(server, Plan(concurrency=1, max_requests=2))
    assert [(r.status, r.failure, r.tokens, r.prompt_tokens) for r in records] == [(200, "", 3, 11)] * 2
    assert server.num_connections == 1
    for record in records:
        assert record.ttft is not None
        assert len(record.content_times) == (3 if size < 50 else len(record.content_times))
        assert record.sent <= record.content_times[0] <= record.content_times[-1] <= record.ended


def test_without_usage_events_are_counted() -> None:
    with ScriptedServer([chunked(sse("", "one", " two"), DONE)]) as server:
        assert [r.tokens for r in run(server, Plan(concurrency=1, max_requests=1))] == [2]


def test_a_whole_answer() -> None:
    body = b'{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":7}}'
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    with ScriptedServer([answer]) as server:
        (record,) = run(server, Plan(concurrency=1, max_requests=1))
    assert (record.tokens, record.prompt_tokens, record.ttft, record.is_good) == (7, 4, None, True)


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (b"HTTP/1.1 429 Too Many\r\ncontent-length: 2\r\n\r\n{}", "status 429"),
        (chunked(sse("", "one"), b'data: {"error":{"message":"x"}}\n\n' + DONE), "error event"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n{}", "connection: the server closed the connection"),
        (b"hello\r\n\r\n", "no HTTP"),
    ],
)
def test_failures_are_told_apart(answer: bytes, failure: str) -> None:
    with ScriptedServer([answer], closes=True) as server:
        (record,) = run(server, Plan(concurrency=1, max_requests=1))
    assert record.failure == failure


def test_a_connection_that_the_server_closed_is_not_used_again() -> None:
    with ScriptedServer([chunked(sse("one"), DONE)], closes=True) as server:
        records = run(server, Plan(arrivals=iter([0.0, 0.2, 0.4])))
    assert [r.failure for r in records] == [""] * 3
    assert server.num_connections == 3


def test_an_open_loop_does_not_wait_and_counts_from_the_intended_start() -> None:
    """A server that stalls must show in every request that was due meanwhile, not only in one."""
    stalled = threading.Event()
    threading.Timer(0.5, stalled.set).start()
    with ScriptedServer([chunked(sse("one"), DONE)], before=stalled.wait) as server:
        records = run(server, Plan(arrivals=iter([0.0, 0.1, 0.2]), max_connections=1))
    began = records[0].intended
    assert [round(r.intended - began, 6) for r in records] == [0.0, 0.1, 0.2]
    for record in records:
        assert record.ended - began >= 0.45
        assert record.e2e == record.ended - record.intended
    assert server.num_connections == 1
    assert records[2].sent > records[2].intended + 0.2  # it waited for the only connection


def test_clients_go_away_when_they_are_told_to() -> None:
    forever = threading.Event()
    with ScriptedServer([STREAM], before=lambda: forever.wait(20)) as server:
        item = Item("text", "/", b"{}", cancel_after_s=0.05)
        (record,) = run(server, Plan(concurrency=1, max_requests=1), item)
        forever.set()
    assert (record.is_cancelled, record.failure, record.is_good) == (True, "", False)


def test_a_request_is_given_up_after_the_time_out() -> None:
    forever = threading.Event()
    with ScriptedServer([STREAM], before=lambda: forever.wait(20)) as server:
        (record,) = run(server, Plan(concurrency=1, max_requests=1, timeout_s=0.1))
        forever.set()
    assert record.failure == "timeout"


def test_nobody_listens() -> None:
    with ScriptedServer([]) as server:
        port = server.port
    records = LoadGenerator("127.0.0.1", port, itertools.repeat(ITEM), Plan(concurrency=2, max_requests=2)).run()
    assert all(r.failure.startswith("connect: ") for r in records)
