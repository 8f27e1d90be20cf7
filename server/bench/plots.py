"""Charts as SVG text, for a report in one file that loads nothing."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

_WIDTH, _HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 26, 40
COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")


@dataclass(frozen=True, slots=True)
class Line:
    """One series."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def line_chart(title: str, x_label: str, y_label: str, lines: Sequence[Line], *, log_x: bool = False) -> str:
    """Return a chart of `lines`, whose y axis begins at 0; points show where there are few."""
    points = [(x, y) for line in lines for x, y in zip(line.x, line.y, strict=True) if not log_x or x > 0]
    if not points:
        return ""
    low, high = min(x for x, _ in points), max(x for x, _ in points)
    top = max(y for _, y in points) or 1.0
    x_ticks, y_ticks = (_log_ticks(low, high) if log_x else _ticks(low, high)), _ticks(0.0, top)
    low, high, top = min(low, x_ticks[0]), max(high, x_ticks[-1]), max(top, y_ticks[-1])

    def place(x: float, y: float) -> tuple[float, float]:
        share = math.log(x / low) / (math.log(high / low) or 1.0) if log_x else (x - low) / ((high - low) or 1.0)
        return (
            _LEFT + share * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - y / top * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = _frame(title, x_label, y_label)
    for tick in x_ticks:
        x, y = place(tick, 0.0)
        parts.append(f'<text x="{x:.1f}" y="{y + 15:.1f}" text-anchor="middle">{_number(tick)}</text>')
    for tick in y_ticks:
        x, y = place(low, tick)
        parts.append(f'<path class="grid" d="M{x:.1f} {y:.1f}H{_WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    for index, line in enumerate(lines):
        color = COLORS[index % len(COLORS)]
        placed = [place(x, y) for x, y in zip(line.x, line.y, strict=True) if not log_x or x > 0]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="1.8"/>')
        if len(placed) <= 20:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in placed]
        if len(lines) > 1:
            parts.append(_legend(index, line.name, color))
    return "".join((*parts, "</svg>"))


def bar_chart(title: str, x_label: str, bars: Sequence[tuple[str, float]]) -> str:
    """Return horizontal bars, one a name."""
    top = max((value for _, value in bars), default=0.0) or 1.0
    left, step = 130, 24
    height = _TOP + step * len(bars) + 24
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{html.escape(title)}">']
    parts.append(f'<text class="title" x="8" y="16">{html.escape(title)}</text>')
    for index, (name, value) in enumerate(bars):
        y, width = _TOP + step * index, (_WIDTH - left - 80) * value / top
        parts.append(f'<text x="{left - 8}" y="{y + 15}" text-anchor="end">{html.escape(name)}</text>')
        parts.append(f'<rect x="{left}" y="{y + 3}" width="{width:.1f}" height="{step - 8}" fill="{COLORS[0]}"/>')
        parts.append(f'<text x="{left + width + 6:.1f}" y="{y + 15}">{_number(value)}</text>')
    parts.append(f'<text x="{_WIDTH - 8}" y="{height - 6}" text-anchor="end">{html.escape(x_label)}</text></svg>')
    return "".join(parts)


def distribution_chart(title: str, lines: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Return cumulative distributions of seconds, as the share of requests within so many milliseconds."""
    drawn = []
    for name, values in lines:
        ordered = sorted(values)
        if ordered:
            marks = [min(len(ordered) - 1, k * len(ordered) // 200) for k in range(201)]
            shares = [100.0 * (mark + 1) / len(ordered) for mark in marks]
            drawn.append(Line(name, [1e3 * max(ordered[mark], 1e-5) for mark in marks], shares))
    return line_chart(title, "ms", "% of them", drawn, log_x=True)


def _frame(title: str, x_label: str, y_label: str) -> list[str]:
    return [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">',
        f'<text class="title" x="8" y="16">{html.escape(title)}</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 6}" text-anchor="end">{html.escape(x_label)}</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="16" text-anchor="end">{html.escape(y_label)}</text>',
    ]


def _legend(index: int, name: str, color: str) -> str:
    y = _TOP + 12 + 15 * index
    return (
        f'<rect x="{_LEFT + 8}" y="{y - 8}" width="10" height="10" fill="{color}"/>'
        f'<text x="{_LEFT + 23}" y="{y + 1}">{html.escape(name)}</text>'
    )


def _ticks(low: float, high: float) -> list[float]:
    """Return up to seven round numbers that span the range."""
    span = (high - low) or 1.0
    step = 10.0 ** math.floor(math.log10(span / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
    first = math.floor(low / step)
    return [step * k for k in range(first, math.ceil(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [10.0**k for k in range(first, max(last, first + 1) + 1)]


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
