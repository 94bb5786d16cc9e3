"""The figures of the README, drawn from the records of the H200 as SVG files.

    python -m cairn.bench.figures benchmarks docs/figures

    serving.svg    output tokens/s of five workloads: ours, vLLM's, and the limit of the card
    training.svg   tokens/s of a training step: ours, torchtitan's
    layers.svg     the layers of the stack

A test holds the files against the records. They stand alone and follow the reader's light or dark setting.
"""

import html
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cairn.bench.overview import TORCHTITAN, VLLM

WIDTH = 760
NAMES, VALUES = 190, 150  # room to the left and to the right of the bars
BAR, GAP, GROUP = 13, 3, 16
WORKLOADS = {
    "nano": "256 mixed requests",
    "latency": "1 request",
    "prefill": "64 long prompts",
    "decode": "256 long answers",
    "shared": "256 with one prefix",
}
LAYERS = (
    ("cli", "verbs: cairn serve, train, plan, lab ..."),
    ("web · labs", "the server's page · experiments with a verdict, the roadmap"),
    ("verify", "does a deployment compute the model that it names"),
    ("fleet", "many servers behind one router"),
    ("plan · bench · eval · compress · align", "predict · measure · score · quantise · post-train"),
    ("train · serve · cluster", "steps and their loop · requests on one model · jobs and failures"),
    ("models", "one decoder family, checkpoints, tokenizer"),
    ("comm", "collectives as data, transfer between layouts"),
    ("kernels", "one operation per file: reference, kernel, cost"),
    ("hw", "what this machine is, and how fast"),
    ("core · report", "config, errors, events, pages; never torch"),
)
STYLE = """
svg { background: #fdfdfb; }
text { font: 13px system-ui, sans-serif; fill: #1c2126; }
.soft { fill: #5b6670; }
.title { font-weight: 600; font-size: 15px; }
.name { font-weight: 600; text-anchor: middle; }
.end { text-anchor: end; }
.ours { fill: #2f6f9f; }
.peer { fill: #b9c2c9; }
.limit { stroke: #b3382c; stroke-width: 2; stroke-dasharray: 3 2; }
.stone { fill: #e9ecea; stroke: #c4cac6; }
@media (prefers-color-scheme: dark) {
svg { background: #15181b; }
text { fill: #e3e6e1; }
.soft { fill: #9aa5ad; }
.ours { fill: #5fa3d3; }
.peer { fill: #4a545c; }
.limit { stroke: #e5796d; }
.stone { fill: #22272b; stroke: #3a4147; }
}
"""


class FigureRow(NamedTuple):
    name: str
    ours: float
    peer: float | None
    limit: float | None = None  # what the card could do at best


class Panel(NamedTuple):
    title: str
    rows: Sequence[FigureRow]
    peer: str  # whose the second bars are


def figures(folder: Path) -> dict[str, str]:
    """Every file by its name."""
    throughput = _read(folder / "h200/throughput.json")
    training = _read(folder / "h200/training.json")
    return {
        "serving.svg": drawn([_serving(throughput, shape) for shape in ("qwen3-0.6b", "qwen3-8b")]),
        "training.svg": drawn([_training(training)]),
        "layers.svg": layers(),
    }


def _serving(record: dict[str, Any], shape: str) -> Panel:
    rows = []
    for workload, name in WORKLOADS.items():
        row = next(
            row
            for row in record["rows"]
            if (row["shape"], row["workload"]) == (shape, workload)
            and not any(row.get(other) for other in ("quantization", "kv_cache", "speculate"))
        )
        ours = row["input_tokens_per_s" if workload == "prefill" else "output_tokens_per_s"]
        limit = ours / row["fraction_of_limit"]
        rows.append(FigureRow(name, ours, VLLM[shape, workload], limit))
    return Panel(f"Serving {shape}, bf16, one H200: tokens/s", rows, "vLLM 0.23")


def _training(record: dict[str, Any]) -> Panel:
    rows = [
        FigureRow(
            f"{row['model']}, {row['dtype']}",
            row["tokens_per_s"],
            TORCHTITAN.get((row["model"], row["dtype"])),
        )
        for row in sorted(record["rows"], key=lambda row: (row["model"], row["dtype"]))
    ]
    return Panel("Training, sequence 4096, one H200: tokens/s", rows, "torchtitan 0.2.2")


# -- drawing --------------------------------------------------------------------------------------


def drawn(panels: Sequence[Panel]) -> str:
    """Bars, one panel below the other. Each row has its own scale, up to its limit: ratios are what is compared."""
    parts: list[str] = []
    y = 12
    for panel in panels:
        parts.append(_text(16, y + 14, panel.title, "title"))
        parts += _legend(panel, y + 34)
        y += 54
        for row in panel.rows:
            parts += _row(row, y)
            y += 2 * BAR + GAP + GROUP
        y += 8
    return _svg(y, parts, "; ".join(panel.title for panel in panels))


def _row(row: FigureRow, y: int) -> list[str]:
    room = WIDTH - NAMES - VALUES
    full = max(row.ours, row.peer or 0.0, row.limit or 0.0)
    parts = [_text(NAMES - 10, y + BAR + 5, row.name, "end")]
    for value, kind, at in ((row.ours, "ours", y), (row.peer, "peer", y + BAR + GAP)):
        if value is not None:
            parts.append(_rect(NAMES, at, room * value / full, BAR, kind))
    label = f"{row.ours:,.0f}" + (f", {row.ours / row.peer:.2f}x" if row.peer else "")
    parts.append(_text(WIDTH - VALUES + 12, y + 11, label))
    if row.peer is not None:
        parts.append(_text(WIDTH - VALUES + 12, y + BAR + GAP + 11, f"{row.peer:,.0f}", "soft"))
    if row.limit is not None:
        x = NAMES + room * row.limit / full
        parts.append(
            f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 2}" y2="{y + 2 * BAR + GAP + 2}"/>'
        )
    return parts


def _legend(panel: Panel, y: int) -> list[str]:
    parts = [_rect(NAMES, y - 10, 12, 12, "ours"), _text(NAMES + 18, y, "Cairn")]
    parts += [_rect(NAMES + 80, y - 10, 12, 12, "peer"), _text(NAMES + 98, y, panel.peer)]
    if any(row.limit for row in panel.rows):
        x = NAMES + 200
        parts.append(f'<line class="limit" x1="{x}" x2="{x}" y1="{y - 12}" y2="{y + 3}"/>')
        parts.append(_text(x + 8, y, "limit of the card"))
    return parts


def layers() -> str:
    """The lowest is the widest, as in a cairn."""
    height, parts = 34, []
    for at, (name, about) in enumerate(LAYERS):
        width = 250 + at * 22
        y = 12 + at * (height + 4)
        x = 16 + (250 + (len(LAYERS) - 1) * 22 - width) / 2
        parts.append(_rect(x, y, width, height, "stone", round_=12))
        middle = x + width / 2
        parts.append(f'<text x="{middle:.0f}" y="{y + 22}" class="name">{html.escape(name)}</text>')
        parts.append(_text(16 + 250 + (len(LAYERS) - 1) * 22 + 16, y + 22, about, "soft"))
    total = 12 + len(LAYERS) * (height + 4) + 26
    parts.append(_text(16, total - 10, "Each layer imports only those below it.", "soft"))
    return _svg(total, parts, "The layers of Cairn", width=940)


def _svg(height: int, parts: Sequence[str], title: str, width: int = WIDTH) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img">\n<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, words: str, class_: str = "") -> str:
    named = f' class="{class_}"' if class_ else ""
    return f'<text{named} x="{x:.0f}" y="{y:.0f}">{html.escape(words)}</text>'


def _rect(x: float, y: float, width: float, height: float, class_: str, round_: int = 2) -> str:
    return f'<rect class="{class_}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{round_}"/>'


def _read(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes())


if __name__ == "__main__":
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    for file, text in figures(source).items():
        (target / file).write_text(text)
