"""Log-log line charts as SVG, which show how costs grow. One panel per unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float]]

WIDE, TALL = 330, 250  # of a panel's grid
LEFT, RIGHT, TOP, BOTTOM = 62, 24, 44, 46
KEY = 17  # a line of the legend
GREY = "#7d838c"  # readable on white and on black, like the colours
COLOURS = ("#2f81f7", "#d29922", "#2da44e", "#e5534b", "#a371f7", "#39a0a8")


@dataclass(frozen=True)
class Panel:
    """Costs in one unit. A line that grows linearly is as steep as the dotted one."""

    title: str
    lines: Mapping[str, Points]  # both numbers above 0
    shown: Callable[[float], str]  # formats a cost


def figure(title: str, across: str, shown: Callable[[float], str], panels: Sequence[Panel]) -> str:
    """The whole image. `across` is the title of the x axis, `shown` formats its values."""
    panels = [panel for panel in panels if any(panel.lines.values())]
    keys = max((len(panel.lines) for panel in panels), default=0)
    height = TOP + TALL + BOTTOM + keys * KEY + 8
    width = len(panels) * (LEFT + WIDE + RIGHT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12" fill="{GREY}">',
        f"<title>{escape(title)}</title>",
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({number * (LEFT + WIDE + RIGHT) + LEFT} {TOP})">')
        parts += _panel(panel, across, shown)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, across: str, shown: Callable[[float], str]) -> list[str]:
    every = [point for line in panel.lines.values() for point in line]
    inputs = sorted({x for x, _ in every})
    low_x, high_x = inputs[0], max(inputs[-1], inputs[0] * 1.01)
    low = 10 ** math.floor(math.log10(min(y for _, y in every)))
    high = max(10 ** math.ceil(math.log10(max(y for _, y in every))), low * 10)

    def at_x(x: float) -> float:
        return WIDE * math.log(x / low_x) / math.log(high_x / low_x)

    def at_y(y: float) -> float:
        return TALL * (1 - math.log(y / low) / math.log(high / low))

    parts = [f'<text x="{-LEFT + 8}" y="-18" font-weight="bold">{escape(panel.title)}</text>']
    power = low
    while power <= high * 1.001:
        y = at_y(power)
        parts += [
            f'<path d="M0 {y:.1f}H{WIDE}" stroke="{GREY}" stroke-opacity=".3"/>',
            f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{escape(panel.shown(power))}</text>',
        ]
        power *= 10
    for x in inputs:
        parts += [
            f'<path d="M{at_x(x):.1f} {TALL}v5" stroke="{GREY}"/>',
            f'<text x="{at_x(x):.1f}" y="{TALL + 19}" text-anchor="middle">{escape(shown(x))}</text>',
        ]
    parts += [
        f'<path d="M0 0V{TALL}H{WIDE}" fill="none" stroke="{GREY}"/>',
        f'<text x="{WIDE / 2}" y="{TALL + 38}" text-anchor="middle">{escape(across)}</text>',
        _proportional(low_x, high_x, low, high, at_x, at_y),
    ]
    for number, (name, line) in enumerate(panel.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        ends = "L".join(f"{at_x(x):.1f} {at_y(y):.1f}" for x, y in line)
        if line:
            parts.append(f'<path d="M{ends}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="3" fill="{colour}"/>' for x, y in line]
        y = TALL + BOTTOM + 8 + number * KEY
        last = f": {panel.shown(line[-1][1])} at {shown(line[-1][0])}" if line else ""
        parts += [
            f'<path d="M0 {y}h24" stroke="{colour}" stroke-width="3"/>',
            f'<text x="30" y="{y + 4}">{escape(name + last)}</text>',
        ]
    return parts


def _proportional(
    low_x: float,
    high_x: float,
    low: float,
    high: float,
    at_x: Callable[[float], float],
    at_y: Callable[[float], float],
) -> str:
    """A dotted line of linear growth, from the panel's lower left corner."""
    end = min(high_x, low_x * high / low)
    return (
        f'<path d="M{at_x(low_x):.1f} {at_y(low):.1f}L{at_x(end):.1f} {at_y(low * end / low_x):.1f}" '
        f'stroke="{GREY}" stroke-dasharray="2 4"/>'
    )
