"""Ledgers as a timeline for Perfetto: one request with the steps of the engine around it, or all of the last minute.

    request abc     |tokenize|  queue  | prefill |      decode        |respond|
      in pieces                 [kv_allocation]   [detokenize] [stream]              sums, drawn where they begin
    engine                        |7 |8    |9|10|11|12|13|14|                        schedule, launch, wait, update

Made of the numbers that are kept anyway, so it needs no recording that would have to be switched on before.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from cairn.core.records import Span
from cairn.core.trace import Track, timeline
from cairn.serve.engine.step_times import StepTimes
from cairn.serve.http.ledger.entry import Entry

STEP_PARTS = ("schedule", "launch", "wait", "update")


def trace_of(entries: Sequence[Entry], steps: Iterable[StepTimes], model: str) -> dict[str, Any]:
    """The entries, each on tracks of its own, and those of the steps that ended while one of them was on its way."""
    start = min((entry.arrived for entry in entries), default=0.0)
    end = max((entry.arrived + entry.seconds for entry in entries), default=0.0)
    tracks = [
        Track(
            "engine",
            "steps",
            [
                span
                for step in steps
                if start <= step.ended and step.ended - step.total <= end
                for span in _step_spans(step)
            ],
        )
    ]
    for entry in entries:
        entry.look()
        tracks += _request_tracks(entry)
    return timeline(tracks, f"cairn {model}")


def _request_tracks(entry: Entry) -> list[Track]:
    name = f"request {entry.id}"
    whole = _span(
        f"{entry.endpoint} {entry.status}",
        entry.arrived,
        entry.seconds,
        prompt_tokens=entry.prompt,
        cached_tokens=entry.cached,
        output_tokens=entry.outputs,
        preemptions=entry.ledger.preemptions,
        longest_gap_s=entry.longest,
    )
    parts = entry.parts()
    line = [
        whole,
        *(_span(part.name, part.start, part.seconds) for part in parts if not part.summed),
    ]
    sums = [part for part in parts if part.summed]
    return [
        Track(name, "phases", line),
        *(
            Track(name, f"{part.name} (sum)", [_span(part.name, part.start, part.seconds)])
            for part in sums
        ),
    ]


def _step_spans(step: StepTimes) -> list[Span]:
    start = step.ended - step.total
    spans = [
        _span(
            f"step {step.number}",
            start,
            step.total,
            sequences=step.sequences,
            tokens=step.tokens,
            prefill_tokens=step.prefill,
        )
    ]
    for name in STEP_PARTS:
        seconds = getattr(step, name)
        spans.append(_span(name, start, seconds))
        start += seconds
    return spans


def _span(name: str, start: float, seconds: float, **fields: object) -> Span:
    return Span(name, round(start * 1e9), max(round(seconds * 1e9), 0), 0, fields)
