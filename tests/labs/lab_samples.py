"""Ceilings and labs made up for tests: known numbers, nothing measured."""

from cairn.hw.ceilings import Ceilings, Identity, Measured, identify
from cairn.hw.probe import probe
from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
from cairn.labs.workbench import Workbench

HERE = Identity(cpu="a CPU", threads=2, gpus=[], driver=None, torch="2.13.0")


def measured(value: float, unit: str = "B/s", how: str = "a test") -> Measured:
    return Measured(value=value, unit=unit, low=value, high=value, runs=3, how=how)  # type: ignore[arg-type]


def ceilings(identity: Identity = HERE) -> Ceilings:
    return Ceilings(
        measured_at="2026-01-01T00:00:00+00:00",
        quick=True,
        identity=identity,
        device="cpu",
        device_name="a CPU",
        copy=measured(1e10),
        host_copy=measured(1e10),
        matmul={"fp32": measured(2e10, "FLOP/s")},
        launch=measured(3e-6, "s"),
        disk_write=measured(1e9),
        disk_read_cold=measured(1e9),
        disk_read_warm=measured(5e9),
        loopback_round_trip=measured(3e-5, "s"),
        loopback_throughput=measured(2e9),
        absent={"matmul.fp8": "no fp8 here"},
    )


def ceilings_here() -> Ceilings:
    """Of this very machine, so that they are not stale; the numbers are made up."""
    return ceilings(identify(probe()))


def both(text: str) -> Words:
    return Words(text, f"中文 {text}")


def outcome(bench: Workbench | None = None) -> Outcome:
    return Outcome(
        checks=[
            Check(what=both("near"), predicted=10.0, measured=11.0, unit="GB/s", within=0.2),
            Check(
                what=both("most"), predicted=5.0, measured=float("nan"), unit="s", kind="at_most"
            ),
        ],
        plots=[
            Plot(
                title=both("curve <b>"),
                x=both("size"),
                y=both("time"),
                lines={
                    "measured": [(1, 1.0), (10, 20.0), (100, float("inf"))],
                    "other": [(1, 2.0)],
                },
                log_x=True,
                log_y=True,
                limit=("limit", 15.0),
            )
        ],
        table=Table(columns=[both("name"), both("value")], rows=[["a & b", 1.25], ["c", 7]]),
        notes=[both("a note")],
    )


def lab(name: str = "sample", run=outcome, **changes) -> Lab:
    parts = dict(
        name=name,
        area="linux",
        title=both(f"Title of {name}"),
        hypothesis=both("It is so."),
        run=run,
        causes=(both("one cause"), both("another cause")),
        code=("cairn/hw/roofline.py:floor",),
        reading=("A Book (2001)",),
        questions=tuple(
            Question(both(f"Question {number}?"), both(f"Answer {number}.")) for number in (1, 2, 3)
        ),
        seconds=1.0,
    )
    return Lab(**{**parts, **changes})
