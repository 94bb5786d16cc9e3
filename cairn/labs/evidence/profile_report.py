"""A torch profile as the tables that Nsight Systems prints: kernels, CUDA calls, copies, idle gaps.

    torch.profiler ──chrome trace──> events ──report──> text of at most 60 lines

Reads the trace's JSON only; needs no GPU and no torch.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

KERNEL, COPY, RUNTIME = "kernel", "gpu_memcpy", "cuda_runtime"
OPERATORS = ("cpu_op", "user_annotation")
ROWS = 8  # of a table
NAME = 72  # characters of a kernel's name


class Event(NamedTuple):
    kind: str
    name: str
    start_us: float
    us: float
    bytes: int = 0

    @property
    def end_us(self) -> float:
        return self.start_us + self.us


def events_of(trace: dict[str, Any]) -> list[Event]:
    """Complete events of a chrome trace, in the order of their start."""
    events = [
        Event(
            str(one.get("cat", "")),
            str(one["name"]),
            float(one["ts"]),
            float(one.get("dur", 0.0)),
            int(one.get("args", {}).get("bytes", 0) or 0),
        )
        for one in trace["traceEvents"]
        if one.get("ph") == "X"
    ]
    return sorted(events, key=lambda event: event.start_us)


def report(events: Sequence[Event], steps: int, head: str) -> str:
    """The tables a person reads first, per step where that makes sense."""
    if not any(event.kind == KERNEL for event in events):
        return _host_report(events, steps, head)
    on_gpu = [event for event in events if event.kind in (KERNEL, COPY, "gpu_memset")]
    host = [event for event in events if event.kind in (*OPERATORS, RUNTIME)]
    wall_us = _span(host or on_gpu)
    busy_us = sum(end - begin for begin, end in merged(on_gpu))
    lines = [
        head,
        f"steps {steps}   wall {wall_us / steps / 1e3:.2f} ms a step   GPU busy {busy_us / wall_us:.0%}"
        f"   kernels {sum(e.kind == KERNEL for e in events) / steps:.0f} a step",
    ]
    for title, kind in (("kernels", KERNEL), ("CUDA calls on the host", RUNTIME)):
        lines += ["", *_table(title, [e for e in events if e.kind == kind], steps, wall_us)]
    lines += ["", *_copies([e for e in events if e.kind == COPY], steps)]
    outer = outermost([e for e in events if e.kind in OPERATORS])
    lines += ["", *_table("operators on the host, outermost", outer, steps, wall_us)]
    return "\n".join([*lines, "", *_gaps(on_gpu, host)]) + "\n"


def _host_report(events: Sequence[Event], steps: int, head: str) -> str:
    """Of a CPU: where the time went by operator, without what its inner operators took."""
    host = [event for event in events if event.kind in OPERATORS]
    wall_us = _span(host)
    covered = sum(end - begin for begin, end in merged(host))
    lines = [
        head,
        f"steps {steps}   wall {wall_us / steps / 1e3:.2f} ms a step   inside of operators "
        f"{covered / wall_us:.0%}   operators {len(host) / steps:.0f} a step",
    ]
    lines += ["", *_table("operators, without what they call", self_times(host), steps, wall_us)]
    lines += ["", *_table("operators, outermost", outermost(host), steps, wall_us)]
    return "\n".join(lines) + "\n"


def self_times(events: Sequence[Event]) -> list[Event]:
    """Each with its own time only: an operator's duration less those that run directly inside of it."""
    own: list[Event] = []
    running: list[
        tuple[float, int]
    ] = []  # end, and place in `own`, of those that are still running
    for event in sorted(events, key=lambda one: (one.start_us, -one.us)):
        while running and event.start_us >= running[-1][0]:
            running.pop()
        if running:
            place = running[-1][1]
            own[place] = own[place]._replace(us=max(0.0, own[place].us - event.us))
        running.append((event.end_us, len(own)))
        own.append(event)
    return own


def merged(events: Iterable[Event]) -> list[tuple[float, float]]:
    """Stretches of time in which at least one of them runs."""
    intervals: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda one: one.start_us):
        if intervals and event.start_us <= intervals[-1][1]:
            intervals[-1] = (intervals[-1][0], max(intervals[-1][1], event.end_us))
        else:
            intervals.append((event.start_us, event.end_us))
    return intervals


def outermost(events: Sequence[Event]) -> list[Event]:
    """Those that no other one of them contains."""
    outer: list[Event] = []
    for event in sorted(events, key=lambda one: (one.start_us, -one.us)):
        if not outer or event.start_us >= outer[-1].end_us:
            outer.append(event)
    return outer


def _span(events: Sequence[Event]) -> float:
    if not events:
        return 1.0
    return max(e.end_us for e in events) - min(e.start_us for e in events)


def _table(title: str, events: Sequence[Event], steps: int, wall_us: float) -> list[str]:
    groups: dict[str, list[float]] = defaultdict(list)
    for event in events:
        groups[event.name].append(event.us)
    largest = sorted(groups.items(), key=lambda pair: -sum(pair[1]))[:ROWS]
    lines = [f"{title:<{NAME}} {'% wall':>7} {'ms/step':>9} {'calls':>7} {'us each':>9}"]
    for name, times in largest:
        total = sum(times)
        lines.append(
            f"{name[:NAME]:<{NAME}} {total / wall_us:>7.1%} {total / steps / 1e3:>9.3f} "
            f"{len(times) / steps:>7.1f} {total / len(times):>9.1f}"
        )
    return lines if largest else [f"{title}: none"]


def _copies(copies: Sequence[Event], steps: int) -> list[str]:
    groups: dict[str, list[Event]] = defaultdict(list)
    for copy in copies:
        groups[copy.name].append(copy)
    if not groups:
        return ["copies: none"]
    lines = [f"{'copies':<{NAME}} {'MB/step':>9} {'calls':>7} {'GB/s':>9}"]
    for name, same_name in groups.items():
        moved, us = sum(e.bytes for e in same_name), sum(e.us for e in same_name)
        lines.append(
            f"{name[:NAME]:<{NAME}} {moved / steps / 1e6:>9.2f} {len(same_name) / steps:>7.1f} "
            f"{moved / us / 1e3:>9.1f}"
        )
    return lines


def _gaps(on_gpu: Sequence[Event], host: Sequence[Event]) -> list[str]:
    """The longest times in which the GPU had nothing to do, and what the host did meanwhile."""
    busy = merged(on_gpu)
    gaps = [(after - before, before, after) for (_, before), (after, _) in pairwise(busy)]
    lines = ["longest idle gaps of the GPU, and the host's operator that covers most of each"]
    for us, before, after in sorted(gaps, reverse=True)[:5]:
        lines.append(f"{us / 1e3:>9.3f} ms   {_most(host, before, after)}")
    return lines if gaps else ["idle gaps: none"]


def _overlap(event: Event, before: float, after: float) -> float:
    return min(event.end_us, after) - max(event.start_us, before)


def _most(host: Sequence[Event], before: float, after: float) -> str:
    covering = [event for event in host if _overlap(event, before, after) > 0]
    if not covering:
        return "(no operator: Python, or a wait outside of torch)"
    # Of nested operators that cover the gap alike, the innermost says most: it is the shortest.
    most = max(_overlap(event, before, after) for event in covering)
    close = [event for event in covering if _overlap(event, before, after) >= 0.9 * most]
    share = most / (after - before)
    name = min(close, key=lambda event: event.us).name[:NAME]
    return f"{name} ({share:.0%} of the gap)" if share > 0.2 else "(no operator: Python, or a wait)"
