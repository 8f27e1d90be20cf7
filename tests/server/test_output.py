"""An output thread outlives a reply that cannot be written, and records it."""

from __future__ import annotations

import pytest

from ftserve.engine.types import FinishReason, TokenEvent
from ftserve.server.output import OutputThread
from ftserve.server.reply import Reply
from tests.server.test_reply import Run


class BrokenError(Exception):
    pass


def break_down(*_: object) -> str:
    raise BrokenError


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_cannot_be_written_is_answered_recorded_and_forgotten(
    stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = Run(stream=stream), Run(stream=stream)
    released: list[object] = []

    def release(reply: Reply) -> None:
        released.append(reply)

    monkeypatch.setattr(Reply, "release", release)
    broken.reply._format = BrokenFormat()  # type: ignore[assignment]  # it has what is called
    output = OutputThread(0)
    feed = output.feed()
    output.start()
    for reason in (None, FinishReason.LENGTH):
        feed.put([TokenEvent(run.requests[0], (65,), reason) for run in (broken, sound)])
    assert output.close(30)
    assert output.recorder.outcomes == {"failed": 1, "200": 1}
    assert sorted(map(id, released)) == sorted(map(id, [broken.reply, sound.reply]))
    assert broken.exchange.is_cancelled
    assert broken.exchange.ends == (2 if broken.exchange.answer else 1)
    assert "could not be written" in caplog.text


class BrokenFormat:
    opening = delta = closing = usage = whole = staticmethod(break_down)
