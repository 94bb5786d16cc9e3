"""A timeline as text for a terminal, and as a page for a browser.

    rank 0  F0 F1 .  .  B0 B0 .  B1 B1        as wide as it lasts; a dot is idle; F0' is the second chunk
    rank 1  .  F0 B0 B0 F1 B1 B1 .  .

Knows nothing about schedules but their timeline; the caller decides where it goes.
"""

from collections.abc import Iterator

from cairn.report.page import Markup, element, facts, heading, join, page, paragraph, table
from cairn.train.parallel.pipeline.actions import Schedule
from cairn.train.parallel.pipeline.simulate import Costs, TimedAction, Timeline

COLOURS = {"F": "#4c78a8", "B": "#54a24b", "I": "#72b7b2", "W": "#eeca3b"}
WORDS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
ROW, MOST_WIDE, LEFT = 30, 1600, 56


def text(schedule: Schedule, timeline: Timeline, width: int = 0) -> str:
    """Text timeline with a line per rank; a cell is the shortest action, or longer to fit into `width`."""
    unit = min(ran.end - ran.start for rank in timeline.ranks for ran in rank)
    cells = round(timeline.span / unit) if unit else 1
    wide = max(2, *(len(_label(r)) + 1 for rank in timeline.ranks for r in rank))
    if width and 8 + cells * wide > width:
        return _narrow(timeline, width)
    lines = []
    for number, rank in enumerate(timeline.ranks):
        line = ["." + " " * (wide - 1)] * cells
        for ran in rank:
            for cell in range(round(ran.start / unit), round(ran.end / unit)):
                line[cell] = _label(ran).ljust(wide)
        lines.append(f"rank {number:<2} " + "".join(line).rstrip())
    return "\n".join(lines)


def _narrow(timeline: Timeline, width: int) -> str:
    """Text timeline with one character per time unit: the action type or a dot."""
    cells = max(width - 8, 10)
    lines = []
    for number, rank in enumerate(timeline.ranks):
        line = ["."] * cells
        for ran in rank:
            first = int(ran.start / timeline.span * cells)
            for cell in range(first, max(first + 1, int(ran.end / timeline.span * cells))):
                line[min(cell, cells - 1)] = ran.action.kind
        lines.append(f"rank {number:<2} " + "".join(line))
    return "\n".join(lines)


def _label(ran: TimedAction) -> str:
    return str(ran.action)


def html(schedule: Schedule, timeline: Timeline, costs: Costs) -> str:
    """HTML page with the timeline, its totals and each rank's share."""
    about = {
        "ranks": str(schedule.size),
        "microbatches": str(schedule.microbatches),
        "chunks per rank": str(schedule.chunks),
        "bubble": f"{timeline.bubble:.1%}",
        "span": f"{timeline.span:g}",
        "most activations": f"{max(timeline.stash):g} microbatches",
    }
    rows = [
        [
            f"rank {rank}",
            f"{timeline.idle[rank]:g}",
            f"{timeline.idle[rank] / timeline.span:.1%}",
            f"{timeline.stash[rank]:g}",
            f"{timeline.weight_stash[rank]:g}",
        ]
        for rank in range(schedule.size)
    ]
    assumed = (
        f"Forward {costs.forward:g}, input gradients {costs.input_gradient:g}, weight gradients "
        f"{costs.weight_gradient:g}, sending {costs.send:g}; a rank's share of the model each."
    )
    return page(
        f"pipeline schedule {schedule.name}",
        facts(about),
        svg(timeline),
        legend(timeline),
        paragraph(assumed),
        heading("Each rank"),
        table(["", "idle", "of the span", "activations kept", "waiting for weights"], rows),
    )


def svg(timeline: Timeline) -> Markup:
    scale = (MOST_WIDE - LEFT) / timeline.span
    shapes = [
        shape for number, rank in enumerate(timeline.ranks) for shape in _row(number, rank, scale)
    ]
    height = ROW * len(timeline.ranks)
    picture = element(
        "svg",
        join(shapes),
        viewBox=f"0 0 {MOST_WIDE} {height}",
        role="img",
        style="width:100%;height:auto;font:12px sans-serif",
        aria_label="timeline",
    )
    return element("div", picture, class_="scroll")


def _row(number: int, rank: list[TimedAction], scale: float) -> Iterator[Markup]:
    top = number * ROW
    yield element("text", f"rank {number}", x="0", y=str(top + 19), fill="currentColor")
    for ran in rank:
        left, width = LEFT + ran.start * scale, (ran.end - ran.start) * scale
        title = element(
            "title",
            f"{WORDS[ran.action.kind]} of microbatch {ran.action.microbatch}, "
            f"chunk {ran.action.chunk}: {ran.start:g} to {ran.end:g}",
        )
        yield element(
            "rect",
            title,
            x=f"{left:.1f}",
            y=str(top + 2),
            width=f"{max(width - 1, 0.5):.1f}",
            height=str(ROW - 4),
            fill=COLOURS[ran.action.kind],
            fill_opacity="0.65" if ran.action.chunk else "1",
        )
        if width > 14:
            yield element(
                "text",
                str(ran.action.microbatch),
                x=f"{left + width / 2:.1f}",
                y=str(top + 19),
                text_anchor="middle",
                fill="#111",
            )


def legend(timeline: Timeline) -> Markup:
    kinds = dict.fromkeys(ran.action.kind for rank in timeline.ranks for ran in rank)
    box = "display:inline-block;width:.8em;height:.8em;margin:0 .4em 0 1em;background:"
    return paragraph(
        *(join([element("span", "", style=box + COLOURS[kind]), WORDS[kind]]) for kind in kinds)
    )
