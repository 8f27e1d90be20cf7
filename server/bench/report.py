"""Runs as text, JSON, and one HTML file that loads nothing."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ftserve.server.bench.observe import ServerUse
from ftserve.server.bench.plots import Line, bar_chart, distribution_chart, line_chart
from ftserve.server.bench.results import Distribution, Record, Summary, gaps, per_second

_STYLE = """
:root { color-scheme: light dark; --ink: #1f2937; --soft: #6b7280; --line: #e5e7eb; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e7eb; --soft: #9ca3af; --line: #374151; --paper: #111827; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1180px;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } code { font-size: .85rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .25rem .8rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
svg .title { font-size: 13px; font-weight: 600; fill: var(--ink); } svg .grid { stroke: var(--line); }
"""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a plan and what was seen of it."""

    name: str
    rate: float | None  # offered requests per second; None: a closed loop
    records: Sequence[Record]
    summary: Summary
    server: ServerUse


def as_json(settings: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Return the settings and every run's summary; times are in milliseconds where the name says so."""
    content = [
        {"name": r.name, "offered_per_s": r.rate, **r.summary.as_dict(), "server": asdict(r.server)} for r in runs
    ]
    return json.dumps({"settings": settings, "runs": content}, indent=1, default=str)


def as_text(run: Run) -> str:
    """Return what a terminal shows."""
    summary, lines = run.summary, []
    failures = ", ".join(f"{count} {why}" for why, count in summary.failures.items()) or "none"
    lines.append(
        f"{run.name}: {summary.answered} of {summary.requests} answered in {summary.wall_s:.1f} s; "
        f"failures: {failures}; cancelled by us: {summary.cancelled}"
    )
    lines.append(
        f"  {summary.requests_per_s:.1f} requests/s, {summary.tokens_per_s:.0f} tokens/s out, "
        f"{summary.prompt_tokens_per_s:.0f} tokens/s in; goodput {summary.goodput_per_s:.1f} requests/s "
        f"({100 * summary.slo_share:.1f} % within the SLO)"
    )
    lines.append(f"  {'ms':14}{'mean':>9}{'p50':>9}{'p90':>9}{'p95':>9}{'p99':>9}{'max':>9}")
    for name, spread in _distributions(summary):
        if spread.count:
            figures = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.max)
            lines.append(f"  {name:14}" + "".join(f"{figure:9.1f}" for figure in figures))
    for kind, spreads in summary.by_kind.items():
        marks = ", ".join(f"{name[:-3]} p50 {s.p50:.1f} p99 {s.p99:.1f}" for name, s in spreads.items() if s.count)
        lines.append(f"  {kind}: {marks}")
    return "\n".join((*lines, *_server_lines(run)))


def _distributions(summary: Summary) -> list[tuple[str, Distribution]]:
    return [
        ("TTFT", summary.ttft_ms),
        ("ITL", summary.itl_ms),
        ("per token", summary.tpot_ms),
        ("end to end", summary.e2e_ms),
        ("started late", summary.late_start_ms),
    ]


def _server_lines(run: Run) -> list[str]:
    server, lines = run.server, []
    if server.cpu_s_by_role:
        roles = ", ".join(f"{role} {spent:.2f}" for role, spent in server.cpu_s_by_role.items() if spent >= 0.005)
        per_request = 1e6 * server.cpu_s / max(1, run.summary.answered)
        lines.append(
            f"  server: {server.cpu_s:.2f} s of CPU ({100 * server.cpu_s / server.seconds:.0f} % of a core, "
            f"{per_request:.0f} us a request): {roles}; {server.rss_mb:.0f} MB"
        )
    if server.device_idle_share is not None:
        lines.append(f"  device: idle {100 * server.device_idle_share:.1f} % of the time")
    if server.num_gc_pauses:
        lines.append(f"  garbage collection: {server.num_gc_pauses} pauses, {1e3 * server.gc_pause_s:.0f} ms in all")
    lines.append(f"  generator: {100 * server.generator_cpu_s / server.seconds:.0f} % of a core")
    return lines


def as_html(title: str, settings: Mapping[str, Any], runs: Sequence[Run]) -> str:
    """Return the report as a page without any reference to elsewhere."""
    shown = " ".join(f"<code>{html.escape(f'{k}={v}')}</code>" for k, v in settings.items() if v is not None)
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        f"<meta name='viewport' content='width=device-width'><title>{html.escape(title)}</title>",
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1><p>{shown}</p>{_table(runs)}",
    ]
    if len(runs) > 1:
        parts.append(f"<h2>All runs</h2><div class='charts'>{''.join(sweep_charts(runs))}</div>")
    parts += [f"<h2>{html.escape(run.name)}</h2><div class='charts'>{''.join(_run_charts(run))}</div>" for run in runs]
    return "".join(parts)


def _table(runs: Sequence[Run]) -> str:
    heads = ("run", "answered", "failed", "req/s", "tok/s", "goodput", "TTFT p50", "p99", "ITL p50", "p99", "E2E p50")
    rows = []
    for run in runs:
        s = run.summary
        failed = sum(s.failures.values())
        rates = (f"{s.requests_per_s:.1f}", f"{s.tokens_per_s:,.0f}", f"{s.goodput_per_s:.1f}")
        times = (s.ttft_ms.p50, s.ttft_ms.p99, s.itl_ms.p50, s.itl_ms.p99, s.e2e_ms.p50)
        cells = (html.escape(run.name), s.answered, failed, *rates, *(f"{value:.1f}" for value in times))
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table><p>Times in milliseconds.</p>"


def sweep_charts(runs: Sequence[Run]) -> list[str]:
    """Return charts over the offered rate, of runs that have one."""
    swept = [run for run in runs if run.rate is not None]
    rates = [run.rate or 0.0 for run in swept]
    cores = [run.server.cpu_s / run.server.seconds for run in swept]
    answered = Line("answered", rates, [run.summary.requests_per_s for run in swept])
    latencies = [
        Line("TTFT p50", rates, [run.summary.ttft_ms.p50 for run in swept]),
        Line("TTFT p99", rates, [run.summary.ttft_ms.p99 for run in swept]),
    ]
    charts = [
        line_chart("Answered", "offered requests/s", "requests/s", [answered, Line("offered", rates, rates)]),
        line_chart("Time to the first token", "offered requests/s", "ms", latencies),
    ]
    if any(cores):
        charts.append(line_chart("Server's CPU", "offered requests/s", "cores", [Line("CPU", rates, cores)]))
    idle = [(run.rate or 0.0, 100 * run.server.device_idle_share) for run in swept if run.server.device_idle_share]
    if idle:
        shares = Line("idle", [rate for rate, _ in idle], [share for _, share in idle])
        charts.append(line_chart("Idle time of the device", "offered requests/s", "%", [shares]))
    return charts


def _run_charts(run: Run) -> list[str]:
    good = [record for record in run.records if record.is_good]
    if not good:
        return []
    seconds = per_second(run.records)
    axis = [float(second) for second in range(len(seconds["tokens"]))]
    ttft = [value for record in good if (value := record.ttft) is not None]
    itl = [gap for record in good for gap in gaps(record.content_times)]
    charts = [
        line_chart("Output", "seconds", "tokens/s", [Line("tokens", axis, seconds["tokens"])]),
        line_chart(
            "Requests",
            "seconds",
            "",
            [Line("open", axis, seconds["running"]), Line("started", axis, seconds["started"])],
        ),
        distribution_chart("Latencies", [("TTFT", ttft), ("ITL", itl), ("end to end", [r.e2e for r in good])]),
    ]
    if run.server.cpu_s_by_role:
        charts.append(bar_chart("Server's CPU by thread", "seconds", [*run.server.cpu_s_by_role.items()]))
    return charts
