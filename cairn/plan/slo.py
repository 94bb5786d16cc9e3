"""Derives the engine's limits from a latency SLO, by simulating the engine. Pure.

ttft=500ms,tpot=25ms  -->  rows, step_ms, max_waiting  and the rate at which the promise holds, each with its reason

rows         as many requests as decode together within the time per token, pages included
step_ms      the time of a step that also decodes: of several candidates the one that holds the highest rate
max_waiting  as many as reach their first token in time at that rate; further requests are refused at once
"""

import math
from typing import NamedTuple

import msgspec

from cairn.core.errors import ConfigError
from cairn.core.units import format_duration, parse_duration
from cairn.hw.datasheet import find_chip
from cairn.plan.device import KNOWN, Device, device
from cairn.plan.serve_cost import Served, step_seconds
from cairn.plan.serve_load import Load, Workload, room, run
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.step import Chunk, Step

REQUESTS = 300  # of one simulation: ten seconds of load, so that a queue that grows is seen
ROWS = (256, 192, 128, 96, 64, 48, 32, 24, 16, 8, 4, 2, 1)
SHARES = (0.75, 0.9, 1.0)  # of the time per token, for a step
HEADROOM = 0.9  # of what the simulation holds: what is promised
TRIALS = 5  # halvings of the rate's interval
# All requests at once end with steps that are nearly empty: a stream of them is faster.
STEADY = 1.3
NAMES = ("ttft", "tpot")


class Slo(msgspec.Struct, frozen=True):
    ttft_s: float
    tpot_s: float

    def words(self) -> str:
        return f"p99 TTFT {format_duration(self.ttft_s)}, TPOT {format_duration(self.tpot_s)}"


class Lengths(msgspec.Struct, frozen=True):
    """Request lengths of the SLO."""

    input_tokens: int = 1024
    output_tokens: int = 256


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: int
    step_ms: float
    max_waiting: int
    rate: float  # requests a second at which the promise holds
    load: Load  # what was simulated there
    why: list[str]


class _Tried(NamedTuple):
    rate: float
    step_ms: float
    load: Load


def parse_slo(text: str) -> Slo:
    """`ttft=500ms,tpot=25ms`, in any order."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if name not in NAMES or not equals or name in limits:
            raise ConfigError(
                f"--slo is {text!r}: {part.strip()!r} is not understood",
                hint="such as ttft=500ms,tpot=25ms",
            )
        try:
            limits[name] = parse_duration(value)
        except ConfigError as error:
            raise ConfigError(f"--slo is {text!r}: {error.message}", hint=error.hint) from None
        if not limits[name]:
            raise ConfigError(f"--slo is {text!r}: {name} is 0", hint="a time above 0")
    missing = [name for name in NAMES if name not in limits]
    if missing:
        raise ConfigError(
            f"--slo is {text!r}: {missing[0]} is missing", hint="such as ttft=500ms,tpot=25ms"
        )
    return Slo(limits["ttft"], limits["tpot"])


def parse_lengths(text: str) -> Lengths:
    """`1024/256`: tokens of a prompt and of an answer."""
    first, slash, second = text.partition("/")
    if (
        not slash
        or not (first.isdecimal() and second.isdecimal())
        or 0 in (int(first), int(second))
    ):
        raise ConfigError(f"--slo-lengths is {text!r}", hint="tokens in and out, such as 1024/256")
    return Lengths(int(first), int(second))


def device_called(driver_name: str) -> Device:
    """The planner's device for a GPU, by the name that its driver gives."""
    chip, _ = find_chip(driver_name)
    for name, entry in KNOWN.items():
        if chip is not None and entry.chip == chip.name:
            return device(name)
    raise ConfigError(
        f"--slo cannot be simulated on {driver_name or 'this device'}",
        hint=f"the planner knows {', '.join(KNOWN)}; elsewhere set --step-ms and --max-num-seqs",
    )


def choose(served: Served, slo: Slo, lengths: Lengths = Lengths()) -> Chosen:  # noqa: B008 (immutable)
    rows = _rows(served, slo, lengths)
    alone = _load(served, lengths, math.inf, rows, 1e3 * slo.tpot_s, requests=1)
    if not holds(alone, slo):
        raise ConfigError(
            f"{slo.words()} cannot be held: one request alone takes {format_duration(alone.ttft_p99)} to its first "
            f"token and {format_duration(alone.tpot_p99)} for each further one",
            hint="more GPUs (--tensor-parallel-size), fewer bits, a smaller model, or a looser --slo",
        )
    candidates = [_most(served, slo, lengths, rows, share) for share in SHARES]
    best = max(candidates, key=lambda one: one.rate)
    rate = HEADROOM * best.rate
    waiting = max(1, math.floor(rate * slo.ttft_s))
    return Chosen(
        max_num_seqs=rows,
        step_ms=best.step_ms,
        max_waiting=waiting,
        rate=rate,
        load=best.load,
        why=_why(served, slo, lengths, rows, best, rate, waiting),
    )


def holds(load: Load, slo: Slo) -> bool:
    return load.ttft_p99 <= slo.ttft_s and load.tpot_p99 <= slo.tpot_s


def _rows(served: Served, slo: Slo, lengths: Lengths) -> int:
    """The most that decode together within the time per token, each half way through its answer."""
    seconds = step_seconds(served)
    for rows in ROWS:
        if seconds(_decoding(rows, lengths)) <= slo.tpot_s and room(served, rows).pages > 0:
            return rows
    return 1


def _decoding(rows: int, lengths: Lengths) -> Step:
    context = lengths.input_tokens + lengths.output_tokens // 2
    requests = [Request(row, [1], SamplingParams()) for row in range(rows)]
    chunks = [Chunk(request, context, 1, 0, (), 1) for request in requests]
    return Step(0, chunks, requests, tokens=rows)


def _most(served: Served, slo: Slo, lengths: Lengths, rows: int, share: float) -> _Tried:
    """The highest rate at which the promise holds with steps of this length."""
    step_ms = round(1e3 * slo.tpot_s * share, 2)
    whole = _load(served, lengths, math.inf, rows, step_ms)
    low, high = 0.0, STEADY * whole.requests / max(whole.seconds, 1e-9)
    held_load: Load | None = None
    for _ in range(TRIALS):
        middle = (low + high) / 2
        load = _load(served, lengths, middle, rows, step_ms)
        if holds(load, slo):
            low, held_load = middle, load
        else:
            high = middle
    return _Tried(low, step_ms, held_load or _load(served, lengths, 0.02 * high, rows, step_ms))


def _load(
    served: Served,
    lengths: Lengths,
    rate: float,
    rows: int,
    step_ms: float,
    requests: int = 0,
) -> Load:
    workload = Workload(
        requests=requests or REQUESTS,
        rate=rate,
        input_least=max(1, int(0.75 * lengths.input_tokens)),
        input_most=max(1, int(1.25 * lengths.input_tokens)),
        output_least=max(1, int(0.75 * lengths.output_tokens)),
        output_most=max(1, int(1.25 * lengths.output_tokens)),
    )
    return run(served, workload, rows, step_ms)


def _why(
    served: Served, slo: Slo, lengths: Lengths, rows: int, best: _Tried, rate: float, waiting: int
) -> list[str]:
    step = format_duration(step_seconds(served)(_decoding(rows, lengths)))
    load = best.load
    shape = f"{lengths.input_tokens} tokens in and {lengths.output_tokens} out"
    return [
        f"--slo {slo.words()}, for requests of {shape}, simulated on {served.device.name}",
        f"--max-num-seqs {rows}: so many decode together in {step} a step",
        f"--step-ms {best.step_ms:g}: of {len(SHARES)} lengths of a step the one that holds the highest rate",
        f"--max-waiting {waiting}: more would wait longer than {format_duration(slo.ttft_s)} at {rate:.3g} requests/s",
        f"holds up to {rate:.3g} requests/s: p99 TTFT {format_duration(load.ttft_p99)}, TPOT "
        f"{format_duration(load.tpot_p99)} at {best.rate:.3g}/s",
    ]
