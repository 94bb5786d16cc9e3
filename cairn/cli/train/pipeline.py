"""`cairn train schedule`: draw a pipeline schedule, and say what it costs. Needs no torch and no rank.

Prints what `cairn.train.parallel.pipeline` finds out, and decides nothing.
"""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import tyro

from cairn.core.config import load
from cairn.core.errors import UsageError

if TYPE_CHECKING:
    from cairn.train.parallel.pipeline.actions import Schedule
    from cairn.train.parallel.pipeline.simulate import Timeline


class TrainSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Draw the timeline of a pipeline schedule, its bubble and what each rank keeps in memory.

    Schedules: gpipe, 1f1b, interleaved, zb-h1, zbv, dualpipev; `all` compares them. F is a forward, B a backward, I and
    W its two parts (gradients of inputs and of weights); a prime marks the second chunk of a rank.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = "1f1b"
    """a schedule, or all"""
    stages: int = 4
    """ranks of the pipeline"""
    microbatches: int = 8
    """microbatches of a step"""
    chunks: int | None = None
    """stages on each rank; only for interleaved, 2 by default"""
    forward: float = 1.0
    """time of a forward through a rank's share of the model"""
    input_gradient: float = 1.0
    """time of the inputs' gradients"""
    weight_gradient: float = 1.0
    """time of the weights' gradients"""
    send: float = 0.0
    """time to send an activation to another rank"""
    html: Path | None = None
    """write one self-contained page to this file"""
    json: bool = False
    """print one JSON document: every action with its start and end"""


def run(args: list[str]) -> int:
    options = load(TrainSchedule, args=args, env_prefix="CAIRN_TRAIN_SCHEDULE_").value
    for name in ("forward", "input_gradient", "weight_gradient"):
        if not 0 < getattr(options, name) < float("inf"):
            raise UsageError(
                f"--{name.replace('_', '-')} is {getattr(options, name)}", hint="a time above 0"
            )
    if not 0 <= options.send < float("inf"):
        raise UsageError(f"--send is {options.send}", hint="a time, or 0 where it is hidden")
    return _compare(options) if options.name == "all" else _draw(options)


def _draw(options: TrainSchedule) -> int:
    from cairn.train.parallel.pipeline import draw

    schedule, timeline = _simulate(options, options.name)
    if options.html is not None:
        options.html.write_text(draw.html(schedule, timeline, _costs(options)), encoding="utf-8")
        print(f"wrote {options.html}", file=sys.stderr)
    if options.json:
        print(msgspec.json.encode(_document(schedule, timeline)).decode())
        return 0
    width = shutil.get_terminal_size((120, 24)).columns if sys.stdout.isatty() else 0
    print(draw.text(schedule, timeline, width))
    print(
        f"\nbubble {timeline.bubble:.1%}   span {timeline.span:g}   "
        f"activations kept at most {max(timeline.stash):g} microbatches"
    )
    return 0


def _compare(options: TrainSchedule) -> int:
    """Compare the schedules that can run with these numbers, with reasons for the others."""
    from cairn.core.errors import ConfigError
    from cairn.train.parallel.pipeline.schedules import SCHEDULES

    rows: list[dict[str, Any]] = []
    for name, kind in SCHEDULES.items():
        try:
            _, timeline = _simulate(options, name)
        except ConfigError as error:
            rows.append({"name": name, "cannot": error.message})
            continue
        rows.append(
            {
                "name": name,
                "bubble": timeline.bubble,
                "span": timeline.span,
                "stash": max(timeline.stash),
                "about": kind.about,
            }
        )
    if options.json:
        print(msgspec.json.encode(rows).decode())
        return 0
    for row in rows:
        if "cannot" in row:
            print(f"{row['name']:<12} {row['cannot']}")
        else:
            print(
                f"{row['name']:<12} bubble {row['bubble']:>6.1%}   span {row['span']:>7g}   "
                f"keeps {row['stash']:>4g} microbatches   {row['about']}"
            )
    return 0


def _simulate(options: TrainSchedule, name: str) -> "tuple[Schedule, Timeline]":
    from cairn.train.parallel.pipeline.schedules import schedule
    from cairn.train.parallel.pipeline.simulate import simulate

    chunks = options.chunks if name == "interleaved" or options.name != "all" else None
    found = schedule(name, options.stages, options.microbatches, chunks)
    return found, simulate(found, _costs(options))


def _costs(options: TrainSchedule) -> Any:
    from cairn.train.parallel.pipeline.simulate import Costs

    return Costs(options.forward, options.input_gradient, options.weight_gradient, options.send)


def _document(schedule: "Schedule", timeline: "Timeline") -> dict[str, Any]:
    ranks = [
        [
            {
                "action": str(r.action),
                "kind": r.action.kind,
                "chunk": r.action.chunk,
                "microbatch": r.action.microbatch,
                "start": r.start,
                "end": r.end,
            }
            for r in rank
        ]
        for rank in timeline.ranks
    ]
    return {
        "name": schedule.name,
        "microbatches": schedule.microbatches,
        "chunks": schedule.chunks,
        "bubble": timeline.bubble,
        "span": timeline.span,
        "idle": timeline.idle,
        "stash": timeline.stash,
        "ranks": ranks,
    }
