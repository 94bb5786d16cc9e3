"""Bars of a device's memory by purpose, one for each option, on the scale of the device.

    fsdp 64, microbatch 4   [weights|gradients|states|activations          ]   |   114.4 of 131.3 GiB
                                                                           limit

Draws only: names, sizes and a limit come from the caller.
"""

from collections.abc import Mapping, Sequence

from cairn.core.units import format_bytes
from cairn.report.page import Markup, element, join

COLOURS = 7


def memory_bars(
    ways: Mapping[str, Mapping[str, int]], total: int, limit: float | None = None
) -> Markup:
    """Bytes by part of each way; `limit`: the share of `total` that may be planned with."""
    parts = list(dict.fromkeys(part for sizes in ways.values() for part in sizes))
    colours = {part: f"m{place % COLOURS}" for place, part in enumerate(parts)}
    rows = join(_row(name, sizes, total, limit, colours) for name, sizes in ways.items())
    widest = max(map(len, ways), default=0)
    bars = element("ul", rows, class_="memory", style=f"--name:{widest}ch")
    return join([_legend(parts, colours), bars])


def _row(
    name: str,
    sizes: Mapping[str, int],
    total: int,
    limit: float | None,
    colours: Mapping[str, str],
) -> Markup:
    used = sum(sizes.values())
    widest = max(total, used)
    pieces = [
        element(
            "span",
            "",
            class_=colours[part],
            style=f"width:{100 * size / widest:.2f}%",
            title=f"{part} {format_bytes(size)}",
        )
        for part, size in sizes.items()
        if size
    ]
    if limit is not None:
        pieces.append(element("b", "", style=f"left:{100 * limit * total / widest:.2f}%"))
    said = f"{format_bytes(used)} of {format_bytes(total)}"
    return element(
        "li",
        element("span", name, class_="name"),
        element("span", join(pieces), class_="stack"),
        element("span", said, class_="value"),
    )


def _legend(parts: Sequence[str], colours: Mapping[str, str]) -> Markup:
    items = (element("span", element("i", "", class_=colours[part]), part) for part in parts)
    return element("p", join(items), class_="legend")


STYLE = """
.memory { list-style: none; padding: 0; }
.memory li { display: flex; gap: .2rem .8rem; align-items: center; margin: .25rem 0; }
.memory .name { flex: 0 0 var(--name); font: .85rem ui-monospace, Menlo, Consolas, monospace; }
.memory .stack { flex: 1 1 12rem; position: relative; display: flex; height: .9rem; background: var(--line);
  border-radius: 2px; overflow: hidden; } .memory .stack span { height: 100%; }
.memory .stack b { position: absolute; top: 0; bottom: 0; width: 2px; background: var(--bad); }
.memory .value { flex: 0 0 12rem; text-align: right; } p.legend { max-width: none; }
.legend span { display: inline-block; } :root { --m6: #b58900; }
.m0 { background: var(--c0); } .m1 { background: var(--c1); } .m2 { background: var(--c2); }
.m3 { background: var(--c3); } .m4 { background: var(--c5); } .m5 { background: var(--c4); }
.m6 { background: var(--m6); }
@media (max-width: 60rem) { .memory li { flex-wrap: wrap; } .memory .name { flex-basis: 100%; } }
"""
