"""The ledger of a job as files in the run's folder, and as metrics.

The supervisor of a run appends what happens to RUN/recovery/events.jsonl and writes the sums to
RUN/recovery/ledger.json (a `JobLedger`, written atomically), twice a second: `cairn jobs why` reads it with
`read_ledger` and prints `JobLedger.line()`.
"""

import contextlib
from importlib.util import find_spec
from pathlib import Path

import msgspec

from cairn.core.errors import DataError
from cairn.core.job_events import AnyEvent
from cairn.core.job_ledger import JobLedger
from cairn.core.metrics import CounterMetric, Gauge, Metrics, MetricSpec

FOLDER = "recovery"
FILE, EVENTS, STATUS, METRICS = "ledger.json", "events.jsonl", "status.json", "metrics.prom"
CATALOGUE_JOB: tuple[MetricSpec, ...] = (
    CounterMetric(
        name="cairn_job_time_seconds_total",
        help="Wall time of the job by where it went: productive, lost, checkpoint, detect, restart, queue.",
        unit="seconds",
        labels=("part", "cause"),
    ),
    CounterMetric(
        name="cairn_job_incidents_total",
        help="Failures that were answered.",
        unit="incidents",
        labels=("cause", "rung"),
    ),
    Gauge(
        name="cairn_job_ettr_ratio",
        help="Productive time over wall time.",
        unit="ratio",
        across="min",
    ),
    Gauge(name="cairn_job_steps", help="Updates done that stayed.", unit="steps", across="max"),
    Gauge(
        name="cairn_job_slow_ranks",
        help="Ranks that are far slower than the others now.",
        unit="ranks",
        across="max",
    ),
    Gauge(
        name="cairn_job_copied_steps",
        help="The newest step of which memory holds every rank's state.",
        unit="steps",
        across="max",
    ),
    Gauge(
        name="cairn_job_doubled_steps",
        help="The newest step of which two nodes hold every rank's state.",
        unit="steps",
        across="max",
    ),
)


def metrics_text(ledger: JobLedger) -> str:
    """The ledger as Prometheus reads it."""
    metrics = Metrics(CATALOGUE_JOB)
    for part, seconds in ledger.parts.items():
        causes = ledger.by_cause.get(part, {})
        for cause, share in causes.items():
            metrics.add("cairn_job_time_seconds_total", max(0.0, share), part=part, cause=cause)
        rest = seconds - sum(causes.values())
        if rest > 1e-9 or not causes:
            metrics.add("cairn_job_time_seconds_total", max(0.0, rest), part=part, cause="none")
    for incident in ledger.incidents:
        metrics.add(
            "cairn_job_incidents_total", 1, cause=incident.cause, rung=incident.rung or "none"
        )
    metrics.set("cairn_job_ettr_ratio", ledger.ettr)
    metrics.set("cairn_job_steps", ledger.steps)
    metrics.set("cairn_job_slow_ranks", len(ledger.slow_now()))
    metrics.set("cairn_job_copied_steps", ledger.copied)
    metrics.set("cairn_job_doubled_steps", ledger.doubled)
    return metrics.render()


def write_ledger(run: Path, ledger: JobLedger) -> None:
    """Whole or not at all: a reader never sees half of it. A host without prometheus_client writes no metrics."""
    folder = run / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    texts = {FILE: msgspec.json.encode(ledger)}
    if find_spec("prometheus_client") is not None:  # a GPU host may have torch and little else
        texts[METRICS] = metrics_text(ledger).encode()
    for name, text in texts.items():
        fresh = folder / f".{name}"
        fresh.write_bytes(text)
        fresh.replace(folder / name)


def read_events(run: Path) -> list[AnyEvent]:
    """Read the events that all attempts of a run have written so far."""
    path = run / FOLDER / EVENTS
    events: list[AnyEvent] = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(msgspec.DecodeError):  # cut off by the end of its writer
            events.append(msgspec.json.decode(line, type=AnyEvent))
    return events


def read_ledger(run: Path) -> JobLedger | None:
    """Read the ledger of a run; None if it has none."""
    path = run / FOLDER / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=JobLedger)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        hint = "remove it; the run writes a new one"
        raise DataError(f"{path} is damaged: {error}", hint=hint) from None
