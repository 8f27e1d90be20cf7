"""Sums, quantiles, plots, and the whole command against a server."""

from __future__ import annotations

import json
import re
from array import array
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from ftserve.server.bench.cli import main
from ftserve.server.bench.observe import cpu_by_role, listener
from ftserve.server.bench.plots import Line, bar_chart, distribution_chart, line_chart
from ftserve.server.bench.results import Distribution, Record, Slo, per_second, summarize
from tests.server.serving import RunningServer


def record(start: float, *contents: float, kind: str = "text", failure: str = "", tokens: int = 0) -> Record:
    made = Record(kind, start, sent=start, ended=contents[-1], status=200, failure=failure)
    made.content_times = array("d", contents)
    made.tokens = tokens or len(contents)
    return made


def test_a_summary() -> None:
    records = [record(0.0, 0.1, 0.2, 0.4), record(1.0, 1.5, 2.0, kind="images"), record(1.0, 1.1, failure="status 500")]
    summary = summarize(records, Slo(ttft=200.0))
    assert (summary.requests, summary.answered, summary.failures) == (3, 2, {"status 500": 1})
    assert summary.wall_s == 2.0
    assert (summary.requests_per_s, summary.goodput_per_s, summary.tokens_per_s) == (1.0, 0.5, 3.0)
    assert summary.ttft_ms.max == pytest.approx(500)
    assert summary.itl_ms.count == 3
    assert summary.tpot_ms.p50 == pytest.approx(500)
    assert sorted(summary.by_kind) == ["images", "text"]


@pytest.mark.parametrize(
    ("slo", "is_met"),
    [
        (Slo(), True),
        (Slo(ttft=90), False),
        (Slo(itl=160, ttft=110), True),
        (Slo(itl=140), False),
        (Slo(e2e=399), False),
    ],
)
def test_goodput_asks_for_every_limit(slo: Slo, is_met: bool) -> None:
    assert slo.is_met(record(0.0, 0.1, 0.2, 0.4)) is is_met


def test_quantiles() -> None:
    spread = Distribution.of(k / 1e3 for k in range(100))
    assert (spread.p50, spread.p90, spread.p99, spread.max) == pytest.approx((50, 90, 99, 99))
    assert Distribution.of([]).p99 == 0.0


def test_seconds_of_a_run() -> None:
    assert per_second([record(0.0, 0.5, 1.5, tokens=4), record(1.2, 1.3)]) == {
        "running": [1.0, 2.0],
        "started": [1.0, 1.0],
        "tokens": [2.0, 3.0],
    }


@pytest.mark.parametrize("values", [[0.0], [3.0, 3.0], [1e-6, 1e6], list(range(300))])
def test_charts_are_well_formed_whatever_they_show(values: list[float]) -> None:
    line = Line("<a & b>", [float(k) for k in range(len(values))], values)
    for chart in (
        line_chart("t & t", "x", "y", [line, line]),
        bar_chart("t", "s", [("<r>", value) for value in values]),
        distribution_chart("t", [("d", values)]),
    ):
        assert ET.fromstring(chart).tag == "svg"
        assert "nan" not in chart


def test_the_listener_of_a_port_is_found(null_server: RunningServer) -> None:
    pid = listener("127.0.0.1", null_server.port)
    assert pid == null_server.process.pid
    assert {"engine", "http", "output", "preprocess"} <= set(cpu_by_role(pid))


def test_the_command(null_server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--requests", "30", "--rate", "300,500", "--max-tokens", "2-4", "--warm-up", "3", "--seed", "5"]
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    assert main([null_server.url, *load, "--html", str(page), "--json", str(figures), "--slo", "e2e=60000"]) == 0
    said = capsys.readouterr().out
    assert said.count("30 of 30 answered") == 2
    assert "requests/s (100.0 % within the SLO)" in said
    runs = json.loads(figures.read_text())["runs"]
    assert [run["offered_per_s"] for run in runs] == [300.0, 500.0]
    assert all(60 <= run["tokens"] <= 120 for run in runs)
    text = page.read_text()
    assert not re.search(r"(src|href)=|https?://(?!127)|@import", text)
    assert text.count("<svg") >= 10


def test_bad_options_are_said_in_a_line(null_server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["http://127.0.0.1:9", "--requests", "1"]) == 2
    assert main(["https://127.0.0.1", "--requests", "1"]) == 2
    assert "plain http" in capsys.readouterr().err
    assert main([null_server.url, "--requests", "1", "--model", "other"]) == 1
    assert "1 status 404" in capsys.readouterr().out
