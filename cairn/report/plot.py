"""Plots as inline SVG: lines, steps and dots over two axes, with nothing to load and nothing to run.

    chart("TTFT", [Series("p99", [(4, 120.0), (8, 180.0)])], x="requests/s", y="ms", limit=("SLO", 500.0))

Colours come from the page's style sheet (see STYLE), so a plot is right in light and in dark; each plot says in words
what it shows, and each mark its values where there are few. Knows nothing about what it shows.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from cairn.report.page import Markup, element, join

Point = tuple[float, float]
Kind = Literal["line", "steps", "dots"]

WIDTH, HEIGHT = 480, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 14, 44
FEW = 60  # marks that say their values
MANY = 1500  # points of a series are thinned to this


class Series(NamedTuple):
    name: str
    points: Sequence[Point]
    kind: Kind = "line"
    colour: int | None = None  # 0..5; by default its place among the series


class Scale(NamedTuple):
    """Mapping from values to coordinates of the plot."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False  # every tenfold takes the same room

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)


def chart(
    title: str,
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    limit: tuple[str, float] | None = None,
    shaded: tuple[float, float] | None = None,
    log_x: bool = False,
    log_y: bool = False,
) -> Markup:
    """A figure with its legend. `limit` is a dashed line across, `shaded` a stretch of the x axis.

    A logarithmic axis has no place for zero and below: such points, and such a limit, are left out.
    """
    shown = [one._replace(points=drawable(one.points, log_x, log_y)) for one in series]
    across, down, x_ticks, y_ticks = axes(
        [one.points for one in shown],
        (LEFT, WIDTH - RIGHT),
        (HEIGHT - BOTTOM, TOP),
        log_x=log_x,
        log_y=log_y,
        limit=limit,
    )
    parts = [*_axes(across, down, x_ticks, y_ticks, x, y)]
    if shaded is not None:
        parts.insert(0, _shade(across, *shaded))
    for place, one in enumerate(shown):
        parts += _marks(one, across, down, place if one.colour is None else one.colour)
    if limit is not None and y_ticks[0] <= limit[1] <= y_ticks[-1]:
        parts += _limit(down, *limit)
    words = ", ".join(one.name for one in series)
    picture = element(
        "svg",
        join(parts),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{title}: {words} ({y}) over {x}",
    )
    caption = element("figcaption", title, _legend(shown))
    return element("figure", caption, picture, class_="plot")


def axes(
    lines: Iterable[Sequence[Point]],
    across: tuple[float, float],
    down: tuple[float, float],
    *,
    log_x: bool,
    log_y: bool,
    limit: tuple[str, float] | None,
) -> tuple[Scale, Scale, list[float], list[float]]:
    """The two scales between the given places, and the round numbers along them."""
    points = [point for line in lines for point in line] or [(float(log_x), float(log_y))]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if limit is not None and limit[1] <= 3 * max(ys) and (limit[1] > 0 or not log_y):
        ys = [*ys, limit[1]]  # far above the data it would flatten it
    x_ticks = log_ticks(min(xs), max(xs)) if log_x else ticks(min(xs), max(xs))
    y_ticks = log_ticks(min(ys), max(ys)) if log_y else ticks(min(0.0, *ys), max(ys))
    return (
        Scale(x_ticks[0], x_ticks[-1], *across, log_x),
        Scale(y_ticks[0], y_ticks[-1], *down, log_y),
        x_ticks,
        y_ticks,
    )


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that begin at or below `low` and end at or above `high`; always two at least."""
    if not high - low > 1e-9 * max(abs(low), abs(high)):  # finer than a number can tell
        pad = abs(low) / 2 or 1.0
        low, high = low - (pad if low else 0.0), high + pad
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """1, 10, 100 around positive values; 1, 2, 5, 10 where they span less; always two at least."""
    for digits in ((1, 2, 5), (1,)):
        powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
        marks = [digit * 10.0**power for power in powers for digit in digits]
        first = max(place for place, mark in enumerate(marks) if mark <= low * (1 + 1e-9))
        last = min(place for place, mark in enumerate(marks) if mark >= high * (1 - 1e-9))
        marks = marks[first : max(last, first + 1) + 1]
        if len(marks) <= most:
            return marks
    step = -(-(len(marks) - 1) // (most - 1))  # over many tenfolds: every second, every third
    marks += [marks[-1] * 10.0**more for more in range(1, step)]
    return marks[::step]


def thin(points: Sequence[Point], most: int = MANY) -> Sequence[Point]:
    """Every n-th point, and always the last."""
    if len(points) <= most:
        return points
    step = -(-len(points) // (most - 1))
    return [*points[::step], points[-1]]


def number(value: float) -> str:
    """Format a tick label: 0, 0.25, 1,500, 2e+06."""
    return f"{value:,.4g}" if abs(value) < 1e6 else f"{value:.3g}"


def drawable(points: Sequence[Point], log_x: bool, log_y: bool) -> Sequence[Point]:
    """The points that can be drawn: finite, and positive on a logarithmic axis."""
    finite = (point for point in points if all(map(math.isfinite, point)))
    return thin([(x, y) for x, y in finite if (x > 0 or not log_x) and (y > 0 or not log_y)])


def _axes(
    across: Scale, down: Scale, x_ticks: list[float], y_ticks: list[float], x: str, y: str
) -> list[Markup]:
    parts = []
    for value in y_ticks:
        at = _px(down(value))
        parts.append(_line(_px(LEFT), at, _px(WIDTH - RIGHT), at, "grid"))
        parts.append(_text(LEFT - 6, down(value) + 4, number(value), "end"))
    for value in x_ticks:
        at = _px(across(value))
        parts.append(_line(at, _px(HEIGHT - BOTTOM), at, _px(HEIGHT - BOTTOM + 4), "axis"))
        parts.append(_text(across(value), HEIGHT - BOTTOM + 17, number(value), "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x, "middle"))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    turned = f"rotate(-90 12 {_px(middle)})"
    parts.append(element("text", y, x="12", y=_px(middle), text_anchor="middle", transform=turned))
    return parts


def _marks(series: Series, across: Scale, down: Scale, colour: int) -> list[Markup]:
    class_ = f"c{colour % 6}"
    places = [(across(x), down(y)) for x, y in series.points]
    parts = []
    if series.kind != "dots" and places:
        path = f"M{_px(places[0][0])} {_px(places[0][1])}"
        for x, y in places[1:]:
            path += f"H{_px(x)}V{_px(y)}" if series.kind == "steps" else f"L{_px(x)} {_px(y)}"
        parts.append(element("path", d=path, class_=f"{class_} stroke"))
    if series.kind == "dots" or (series.kind == "line" and len(places) <= FEW):
        said = len(places) <= FEW
        for (x, y), values in zip(places, series.points, strict=True):
            inner = f"{series.name}: {number(values[0])}, {number(values[1])}"
            tip = [element("title", inner)] if said else []
            radius = "3" if said else "1.6"
            parts.append(element("circle", *tip, cx=_px(x), cy=_px(y), r=radius, class_=class_))
    return parts


def _limit(down: Scale, name: str, value: float) -> list[Markup]:
    at = down(value)
    line = _line(_px(LEFT), _px(at), _px(WIDTH - RIGHT), _px(at), "limit")
    return [line, _text(WIDTH - RIGHT - 4, at - 5, name, "end")]


def _shade(across: Scale, begin: float, end: float) -> Markup:
    left, right = across(max(begin, across.low)), across(min(end, across.high))
    return element(
        "rect",
        x=_px(left),
        y=str(TOP),
        width=_px(max(right - left, 0)),
        height=str(HEIGHT - TOP - BOTTOM),
        class_="shade",
    )


def _legend(series: Sequence[Series]) -> Markup:
    items = (
        element(
            "span",
            element("i", "", class_=f"c{(place if one.colour is None else one.colour) % 6}"),
            one.name,
        )
        for place, one in enumerate(series)
    )
    return element("span", join(items), class_="legend")


def _line(x1: str, y1: str, x2: str, y2: str, class_: str) -> Markup:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def _text(x: float, y: float, words: str, anchor: str) -> Markup:
    return element("text", words, x=_px(x), y=_px(y), text_anchor=anchor)


def _px(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


STYLE = """
:root { --c0: #2f6fa8; --c1: #c2702a; --c2: #2f8a57; --c3: #8a4f9e; --c4: #b3382c; --c5: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --c0: #7fb3e0; --c1: #e5a468; --c2: #6cc492; --c3: #c395d6;
  --c4: #e5796d; --c5: #a3abb5; } }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr)); gap: 1rem 2rem; }
.plot { margin: .6rem 0; max-width: 44rem; } .plot svg { width: 100%; height: auto; display: block; }
.plot text { font: 11px system-ui, sans-serif; fill: var(--soft); }
.plot figcaption { font-weight: 600; font-size: .9rem; } .legend { font-weight: 400; color: var(--soft); }
.legend span { margin-left: .9rem; white-space: nowrap; }
.legend i { display: inline-block; width: .7rem; height: .7rem; border-radius: 2px; margin-right: .3rem; }
.grid, .axis { stroke: var(--line); } .limit { stroke: var(--bad); stroke-dasharray: 6 4; }
.shade { fill: var(--bar); opacity: .12; } .plot .stroke { fill: none !important; stroke-width: 1.8; }
.c0 { fill: var(--c0); background: var(--c0); } .c1 { fill: var(--c1); background: var(--c1); }
.c2 { fill: var(--c2); background: var(--c2); } .c3 { fill: var(--c3); background: var(--c3); }
.c4 { fill: var(--c4); background: var(--c4); } .c5 { fill: var(--c5); background: var(--c5); }
.stroke.c0 { stroke: var(--c0); } .stroke.c1 { stroke: var(--c1); } .stroke.c2 { stroke: var(--c2); }
.stroke.c3 { stroke: var(--c3); } .stroke.c4 { stroke: var(--c4); } .stroke.c5 { stroke: var(--c5); }
"""
