"""Small line charts as SVG: they cost a millisecond, where a plotting library costs half a second."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 380, 220
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 30, 28
MOST = 200
"""Points a line; longer ones are averaged."""
COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728")


def charts(panels: Mapping[str, Mapping[str, Points]], across: int = 2) -> str:
    """Panels side by side, as one SVG: title to lines, and a line's name to its points (x, y). Empty ones are left out.

    Names are escaped.
    """
    filled = {title: {name: each for name, each in lines.items() if each} for title, lines in panels.items()}
    filled = {title: lines for title, lines in filled.items() if lines}
    rows = -(-len(filled) // across)
    width, height = WIDTH * min(across, max(1, len(filled))), HEIGHT * max(1, rows)
    drawn = [
        f'<g transform="translate({WIDTH * (place % across)},{HEIGHT * (place // across)})">{_panel(title, lines)}</g>'
        for place, (title, lines) in enumerate(filled.items())
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    return head + f'<rect width="{width}" height="{height}" fill="#fff"/>' + "".join(drawn) + "</svg>"


def data_uri(svg: str) -> str:
    """The picture as an address that holds it."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def thinned(points: Points, most: int = MOST) -> list[tuple[float, float]]:
    """At most so many points, each the mean of its neighbourhood.

    >>> thinned([(0, 1.0), (1, 3.0), (2, 5.0), (3, 5.0)], most=2)
    [(0.5, 2.0), (2.5, 5.0)]
    """
    if len(points) <= most:
        return list(points)
    bounds = [round(place * len(points) / most) for place in range(most + 1)]
    parts = [points[start:stop] for start, stop in pairwise(bounds)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def _panel(title: str, lines: Mapping[str, Points]) -> str:
    xs = [x for points in lines.values() for x, _ in points]
    ys = [y for points in lines.values() for _, y in points]
    x, y = _Axis(xs, LEFT, WIDTH - RIGHT), _Axis(ys, HEIGHT - BOTTOM, TOP)
    text = [f'<text x="{LEFT}" y="16" font-size="13">{escape(title)}</text>', _frame(x, y)]
    for place, (name, points) in enumerate(lines.items()):
        colour, drawn = COLOURS[place % len(COLOURS)], thinned(points)
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in drawn)
        text.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(drawn) <= 20:
            text += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.5" fill="{colour}"/>' for a, b in drawn]
        if len(lines) > 1:
            at = WIDTH - RIGHT - 70 * (len(lines) - place) + 10
            text.append(f'<text x="{at}" y="16" font-size="11" fill="{colour}">{escape(name)}</text>')
    return "".join(text)


class _Axis:
    """From values to places on the picture."""

    def __init__(self, values: Sequence[float], start: float, stop: float) -> None:
        low, high = min(values), max(values)
        spare = 0.5 if low == high else 0.0
        self.low, self.high, self.start, self.stop = low - spare, high + spare, start, stop

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    @property
    def ticks(self) -> list[float]:
        return [self.low, (self.low + self.high) / 2, self.high]


def _frame(x: _Axis, y: _Axis) -> str:
    parts = []
    for value in y.ticks:
        parts.append(f'<line x1="{x.start}" x2="{x.stop}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{x.start - 5}" y="{y(value) + 4:.1f}" font-size="10" text-anchor="end">{value:.3g}</text>'
        )
    parts += [
        f'<text x="{x(value):.1f}" y="{y.start + 16}" font-size="10" text-anchor="middle">{value:.4g}</text>'
        for value in x.ticks
    ]
    return "".join(parts)
