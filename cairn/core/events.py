"""Records what happened when: spans, instants and scalars, one JSONL file per process.

    with span("prefill", tokens=512):            a block that takes time
    instant("preempted", request=7)              a moment
    scalar("loss", 2.31, step=100)               a number at a moment

    listen("run.jsonl") ... close()              from here to there they are written down

This is the only global state in Cairn, and it is off until `listen` is called: a span then costs a
function call. Recording never blocks, never raises and never stops the program; what did not fit
is counted in the file, and a disk that fails is one warning on stderr. A forked child writes its
own file beside its parent's. What a line looks like is in `records`, how it gets to the disk in
`sink`, how it is drawn in `trace`; what an event means is known only to its sender.
"""

import atexit
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cairn.core.errors import ConfigError
from cairn.core.records import Instant, Scalar, Span
from cairn.core.sink import QUEUE_LIMIT, EventSink, reason


class SilentSpan:
    """A span without a listener: one shared object that forgets everything."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    def note(self, **fields: object) -> None:
        """Adds fields that are known only inside the span."""


class OpenSpan(SilentSpan):
    """A span that is being measured; it is written when it ends."""

    __slots__ = ("fields", "name", "sink", "start_ns")

    def __init__(self, sink: EventSink, name: str, fields: dict[str, Any]) -> None:
        self.sink = sink
        self.name = name
        self.fields = fields
        self.start_ns = 0

    def __enter__(self) -> Self:
        self.start_ns = time.monotonic_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        duration_ns = time.monotonic_ns() - self.start_ns
        ended_by = kind.__name__ if kind else None
        thread = self.sink.thread()
        self.sink.put(Span(self.name, self.start_ns, duration_ns, thread, self.fields, ended_by))

    def note(self, **fields: object) -> None:
        self.fields = {**self.fields, **fields}


_SILENT = SilentSpan()
_sink: EventSink | None = None


def span(name: str, /, **fields: object) -> SilentSpan:
    """Measures the block under `with`. Fields are written later: give values that do not change."""
    sink = _sink
    return _SILENT if sink is None else OpenSpan(sink, str(name), fields)


def instant(name: str, /, **fields: object) -> None:
    """Something happened now."""
    sink = _sink
    if sink is not None:
        sink.put(Instant(str(name), time.monotonic_ns(), sink.thread(), fields))


def scalar(name: str, value: float, /, **fields: object) -> None:
    """A number at this moment: a loss, the length of a queue."""
    sink = _sink
    if sink is not None:
        number = _number(value)
        if number is None:
            fields["value"] = value
        sink.put(Scalar(str(name), time.monotonic_ns(), sink.thread(), number, fields))


def listen(path: Path | str, *, name: str | None = None, limit: int = QUEUE_LIMIT) -> Path:
    """Begins to record into a new file and returns its path, which gets a number if it is taken."""
    global _sink
    close()
    sink = EventSink(Path(path), name or Path(path).stem, limit)
    try:
        sink.start()
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            f"cannot write events to {path}: {reason(error)}",
            hint="choose a folder that you may write to",
        ) from None
    _sink = sink
    return sink.path


def listen_if_asked(command: str, env: Mapping[str, str] = os.environ) -> Path | None:
    """Records into CAIRN_EVENTS/<command>-<pid>.jsonl when that variable names a folder."""
    folder = env.get("CAIRN_EVENTS")
    if not folder:
        return None
    return listen(Path(folder) / f"{command}-{os.getpid()}.jsonl", name=f"cairn {command}")


def listening() -> bool:
    """Return whether events are recorded, for callers whose events are expensive to compute."""
    return _sink is not None and _sink.is_open


def close() -> None:
    """Writes what is in the queue and stops recording; at exit this happens by itself."""
    global _sink
    sink, _sink = _sink, None
    if sink is not None:
        sink.close()


def _number(value: object) -> float | None:
    try:
        return float(value)  # type: ignore[arg-type]  # a tensor and a NumPy scalar have __float__
    except Exception:  # noqa: BLE001  the __float__ of another library
        return None


def _after_fork_in_child() -> None:
    global _sink
    if _sink is not None:
        _sink = _sink.replace_in_child()


atexit.register(close)
os.register_at_fork(after_in_child=_after_fork_in_child)


def benchmark(spans: int = 200_000) -> tuple[float, float]:
    """Seconds per span without a listener, and with one."""
    import tempfile

    def seconds_per_span() -> float:
        start = time.perf_counter()
        for step in range(spans):
            with span("step", step=step):
                pass
        return (time.perf_counter() - start) / spans

    off = min(seconds_per_span() for _ in range(3))
    with tempfile.TemporaryDirectory() as folder:
        listen(Path(folder) / "events.jsonl", limit=4 * spans)
        on = seconds_per_span()
        close()
    return off, on


if __name__ == "__main__":
    from cairn.core.units import format_duration

    off, on = benchmark()
    print(f"span, no listener       {format_duration(off):>10}   (limit 2 us)")
    print(f"span, recorded          {format_duration(on):>10}")
