"""A line chart as inline SVG: the report opens anywhere and needs no plotting library."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 120, 16, 40
COLOURS = ("#1565c0", "#c62828", "#2e7d32", "#6a1b9a")

Points = Sequence[tuple[float, float]]


def line_chart(
    series: Mapping[str, Points],
    *,
    x_label: str,
    y_label: str,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """`series` as lines with a legend; `marks` are labelled vertical lines at an x."""
    points = [p for line in series.values() for p in line]
    x0, x1 = _range([x for x, _ in points])
    y0, y1 = _range([y for _, y in points])

    def at(x: float, y: float) -> tuple[float, float]:
        px = LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        py = HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)
        return px, py

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg" '
        f'font-family="system-ui, sans-serif" font-size="12">'
    ]
    for y in _ticks(y0, y1):
        (px, py), (qx, _) = at(x0, y), at(x1, y)
        parts.append(f'<path d="M{px:.1f} {py:.1f}H{qx:.1f}" stroke="#ddd"/>')
        parts.append(_text(px - 6, py + 4, f"{y:g}", "end"))
    for x in _ticks(x0, x1):
        px, py = at(x, y0)
        parts.append(_text(px, py + 16, f"{x:g}", "middle"))
    for i, (x, label) in enumerate(marks):
        (px, top), (_, bottom) = at(x, y1), at(x, y0)
        parts.append(
            f'<path d="M{px:.1f} {top:.1f}V{bottom:.1f}" stroke="#999" stroke-dasharray="4 3"/>'
        )
        parts.append(_text(px + 4, top + 12 + 14 * i, label, "start"))  # stepped: none overlap
    for i, (name, line) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in (at(x, y) for x, y in line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(WIDTH - RIGHT + 10, TOP + 12 + 18 * i, name, "start", colour))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(_text(middle, HEIGHT - 6, x_label, "middle"))
    parts.append(
        f'<text transform="translate(14 {HEIGHT / 2}) rotate(-90)" text-anchor="middle" '
        f'fill="#333">{html.escape(y_label)}</text>'
    )
    return "".join([*parts, "</svg>"])


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers inside [low, high]."""
    raw = (high - low) / count
    power = 10.0 ** (len(f"{int(raw)}") - 1) if raw >= 1 else 0.1
    step = next(s for s in (power, 2 * power, 5 * power, 10 * power) if s >= raw)
    first = -(-low // step)
    return [round(step * (first + i), 6) for i in range(int((high - first * step) / step) + 1)]


def _text(x: float, y: float, text: str, anchor: str, colour: str = "#333") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{html.escape(text)}</text>"
    )
