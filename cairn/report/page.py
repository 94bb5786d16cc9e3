"""HTML pages from escaped text, tables, bars and facts.

Everything a page needs is in it: style and script are inline, there is no font, image or library to fetch, and it
opens from a file without a network. It is readable without a script, in light and in dark. Knows nothing about what
it shows; needs only the standard library.

    page("rmsnorm", heading("Resources"), facts({"registers": "32"}), table(["stage", "ms"], [["ptx", "12"]]))
"""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

Level = Literal["good", "bad", "note"]


class Markup(str):
    """HTML that is safe to insert as it is; every other string is text and gets escaped."""

    __slots__ = ()


def element(tag: str, *children: str, **attributes: str | bool) -> Markup:
    """<tag name="value">children</tag>; class_ stands for class, data_x for data-x, True for a bare name."""
    written = []
    for name, value in attributes.items():
        key = name.rstrip("_").replace("_", "-")
        if value is True:
            written.append(f" {key}")
        elif value is not False:
            written.append(f' {key}="{html.escape(str(value), quote=True)}"')
    inner = "".join(safe(child) for child in children)
    return Markup(f"<{tag}{''.join(written)}>{inner}</{tag}>")


def safe(text: str) -> Markup:
    return text if isinstance(text, Markup) else Markup(html.escape(str(text), quote=False))


def join(parts: Iterable[str]) -> Markup:
    return Markup("".join(safe(part) for part in parts))


def heading(text: str, level: int = 2) -> Markup:
    return element(f"h{level}", text)


def paragraph(*parts: str) -> Markup:
    return element("p", *parts)


def notice(level: Level, *parts: str) -> Markup:
    return element("p", *parts, class_=f"notice {level}")


def facts(pairs: Mapping[str, str]) -> Markup:
    """Short statements side by side: a name, and below it a value."""
    cells = (
        element("div", element("dt", name), element("dd", value)) for name, value in pairs.items()
    )
    return element("dl", join(cells), class_="facts")


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """The first column is left, all others are right: names, then numbers."""
    head = element("tr", join(element("th", text, scope="col") for text in headings))
    body = join(element("tr", join(element("td", cell) for cell in row)) for row in rows)
    inner = join([element("thead", head), element("tbody", body)])
    return element("div", element("table", inner), class_="scroll")


def bars(values: Mapping[str, float], unit: str = "") -> Markup:
    """Bar chart with one bar for each value, scaled to the largest."""
    largest = max(values.values(), default=0.0) or 1.0
    rows = []
    for name, value in values.items():
        width = f"width:{100 * max(value, 0) / largest:.1f}%"
        bar = element("span", element("span", "", style=width), class_="bar")
        number = element("span", f"{value:,.4g}{unit}", class_="value")
        rows.append(element("li", element("span", name, class_="name"), bar, number))
    return element("ul", join(rows), class_="bars")


def data(identifier: str, value: object) -> Markup:
    """A value for the script of the page, as JSON that cannot end its own element."""
    text = json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
    return Markup(f'<script type="application/json" id="{html.escape(identifier)}">{text}</script>')


def page(title: str, *body: str, script: str = "", style: str = "", language: str = "en") -> str:
    """The whole document. `script` runs when everything is there, and has to be free of `</script`."""
    if "</script" in script.lower():
        raise ValueError("a script cannot contain </script")
    code = f"<script>{script}</script>" if script else ""
    return (
        "<!doctype html>\n"
        f'<html lang="{html.escape(language)}"><head><meta charset="utf-8"><title>{safe(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}{style}</style></head>\n"
        f"<body><main>{element('h1', title)}{join(body)}</main>{code}</body></html>\n"
    )


STYLE = """
:root { color-scheme: light dark; --ink: #1c2126; --soft: #5b6670; --paper: #fdfdfb; --line: #d9dcd6;
  --bar: #7aa2c4; --good: #2f7d4f; --bad: #b3382c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e6e1; --soft: #9aa5ad; --paper: #15181b; --line: #33393e;
  --bar: #4d7ca3; --good: #66b985; --bad: #e5796d; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { padding: 1.5rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 1.6rem 0 .5rem; }
p { margin: .3rem 0; max-width: 75ch; } .scroll { overflow-x: auto; }
pre, code, td, dd, .value { font-family: ui-monospace, Menlo, Consolas, monospace; font-size: .85rem; }
table { border-collapse: collapse; } th { color: var(--soft); font-weight: 500; text-align: right; }
td { text-align: right; font-variant-numeric: tabular-nums; } th:first-child, td:first-child { text-align: left; }
td, th { padding: .2rem .7rem .2rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
.facts { display: flex; flex-wrap: wrap; gap: .4rem 2rem; margin: .5rem 0; }
dt { color: var(--soft); font-size: .8rem; } dd { margin: 0; }
.bars { list-style: none; padding: 0; max-width: 46rem; } .bars li { display: flex; gap: .8rem; align-items: center; }
.bars .name { flex: 0 0 11rem; } .bars .bar { flex: 1; } .bars .value { flex: 0 0 6rem; text-align: right; }
.bar span { display: block; height: .7rem; background: var(--bar); border-radius: 2px; min-width: 1px; }
.notice { border-left: 3px solid var(--soft); padding-left: .7rem; }
.notice.good { border-color: var(--good); } .notice.bad { border-color: var(--bad); }
"""
