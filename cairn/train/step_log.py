"""Step log of a run: the record with its rates, its sinks, and the losses so far.

A full disk costs lines of the log, not the run. Knows no batches and no checkpoints; `metrics_log` has the files.
"""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch

from cairn.core.events import scalar
from cairn.hw.roofline import dtype_name
from cairn.train.bad_step import Verdict
from cairn.train.config import Train
from cairn.train.flops import measured_flops, peak_flops, step_flops
from cairn.train.metrics_log import Line, Record, Sink, open_sinks
from cairn.train.parallel.interface import HasMetrics
from cairn.train.state import TrainState
from cairn.train.step import StepResult

LogLine = Callable[[str], None]
OnRecord = Callable[[Record], None]


class Documents(NamedTuple):
    """Documents of a step."""

    lengths: list[int]
    prefixes: list[int]  # tokens that each goes on from


class StepLog:
    """Log of a process; only rank 0 has sinks."""

    def __init__(
        self, state: TrainState, world: int, log_line: LogLine, on_record: OnRecord
    ) -> None:
        self.state, self.world = state, world
        self.log_line, self.on_record = log_line, on_record
        self.config: Train = state.config
        self.losses: list[float] = []  # the finite ones
        self.read_at = time.perf_counter()  # when the numbers of the last step were read
        self._sinks: list[Sink] = []
        self._lost = False  # the last line could not be written
        self._peak = _peak(state)
        self._measured = measured_flops(state.device.type, state.config.precision.kind)

    def open(self) -> None:
        as_dict = msgspec.to_builtins(self.config, enc_hook=str)
        self._sinks = open_sinks(self.config.folder, self.config.log, self.state.step, as_dict)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()

    def rewind(self) -> None:
        """The run has gone back to where `state.step` updates are done."""
        for sink in self._sinks:
            sink.rewind(self.state.step)

    def note(
        self,
        result: StepResult,
        documents: Documents,
        loss: float,
        norm: float,
        verdict: Verdict,
        in_flight: int,
    ) -> None:
        """A step whose numbers were read just now; `in_flight`: steps behind it that were not read yet."""
        now = time.perf_counter()
        seconds, self.read_at = now - self.read_at, now
        done = result.step + 1
        if math.isfinite(loss):
            self.losses.append(loss)
            scalar("loss", loss, step=done)
        tokens = self.state.tokens - in_flight * self.config.tokens_per_step
        flops = self._flops(documents) / seconds
        record = Record(
            step=done,
            loss=_finite(loss),
            norm=_finite(norm),
            lr=result.lr,
            tokens=tokens,
            seconds=seconds,
            tokens_per_s=self.config.tokens_per_step / seconds,
            mfu=flops / self._peak if self._peak else None,
            of_measured=flops / self._measured if self._measured else None,
            peak_gib=_peak_gib(self.state.device),
            bad=verdict.why,
            metrics=self.state.loss.metrics() if isinstance(self.state.loss, HasMetrics) else {},
        )
        self.on_record(record)
        if done % self.config.log.every == 0 or done in (1, self.config.steps) or record.bad:
            self.put(record)

    def put(self, line: Line) -> None:
        """Write a line to all sinks; a lost line is reported once."""
        try:
            for sink in self._sinks:
                sink.put(line)
            self._lost = False
        except OSError as error:
            if not self._lost:
                self.log_line(
                    f"warning: step {line.step} is not in the log: {error.strerror or error}"
                )
            self._lost = True

    def _flops(self, documents: Documents) -> float:
        """FLOPs of a step on this rank, averaged over all ranks."""
        lengths, prefixes = documents
        adapted = self.config.adapter.rank > 0
        of_data_rank = step_flops(self.state.spec, lengths, adapted, prefixes)
        return of_data_rank * self.state.parallel.data_ranks / self.world


def _peak(state: TrainState) -> float | None:
    if state.device.type != "cuda":
        return None
    dtype = dtype_name(state.config.precision.kind)
    return peak_flops(torch.cuda.get_device_name(state.device), dtype)


def _peak_gib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
