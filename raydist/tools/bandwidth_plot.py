"""Bus bandwidth over message size as an SVG, without a plotting library. (pure)

Such a library would be larger than raydist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from raydist.tools.bandwidth_figures import Row, size_text

WIDTH = 860
HEIGHT = 460
LEFT = 70
TOP = 20
RIGHT = 150
BOTTOM = 50
COLOURS = (
    "#1f77b4",
    "#ff7f0e",
    "#2ca02c",
    "#d62728",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#bcbd22",
)


def plot(rows: Sequence[Row]) -> str:
    """Draw a line for each operation; both axes are logarithmic."""
    shown = [row for row in rows if row.busbw > 0]
    parts = ['<rect width="100%" height="100%" fill="white"/>']
    if shown:
        x_low, x_high = span([math.log2(row.size) for row in shown])
        y_low, y_high = span([math.log10(row.busbw) for row in shown])

        def x(value: float) -> float:
            return LEFT + (value - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

        def y(value: float) -> float:
            return HEIGHT - BOTTOM - (value - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

        for exponent in range(x_low, x_high + 1, max(1, (x_high - x_low) // 8)):
            parts += [
                svg_line(x(exponent), TOP, x(exponent), HEIGHT - BOTTOM),
                svg_text(x(exponent), HEIGHT - 30, _size(exponent)),
            ]
        for exponent in range(y_low, y_high + 1):
            parts += [
                svg_line(LEFT, y(exponent), WIDTH - RIGHT, y(exponent)),
                svg_text(35, y(exponent) + 4, f"{10**exponent:g}"),
            ]
        for number, op in enumerate(dict.fromkeys(row.op for row in shown)):
            colour = COLOURS[number % len(COLOURS)]
            points = " ".join(
                f"{x(math.log2(row.size)):.1f},{y(math.log10(row.busbw)):.1f}"
                for row in shown
                if row.op == op
            )
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
            parts.append(svg_text(WIDTH - RIGHT / 2, TOP + 15 + 18 * number, op, colour))
    parts.append(
        svg_text((WIDTH - RIGHT + LEFT) / 2, HEIGHT - 8, "message size, bytes; busbw in GB/s")
    )
    box, font = f'viewBox="0 0 {WIDTH} {HEIGHT}"', 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} {font}>'
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def span(values: Sequence[float]) -> tuple[int, int]:
    """Return the nearest integers below and above the values; they always differ."""
    low = math.floor(min(values))
    return low, max(low + 1, math.ceil(max(values)))


def svg_line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def svg_text(x: float, y: float, label: str, colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" fill="{colour}">{label}</text>'


def _size(exponent: int) -> str:
    return size_text(2.0**exponent)
