"""Repeats the step until the run is done: data in, numbers out, a checkpoint now and then.

    batches -> train_step -> (numbers of the step before) -> watch -> log
                  ^                                            |
                  `---- rewind to the last checkpoint <--------'

On a GPU the numbers of a step are read while the next one runs, so the device never waits for the host. Ctrl-C,
SIGTERM and a closed terminal end the run after the current step, with a checkpoint (`stop_signals`). Knows neither
layouts nor models: `state.parallel` does.
"""

import gc
import math
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from cairn.core.errors import CairnError, DataError
from cairn.core.events import instant, scalar
from cairn.core.garbage_collection import quiet_collector
from cairn.train.bad_step import Verdict, write_down
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.choose import choose_newest
from cairn.train.checkpoint.load import About, check_model, load_pieces, read_about
from cairn.train.checkpoint.save import Saver
from cairn.train.config import Train
from cairn.train.data.batch import Batch
from cairn.train.data.source import Source
from cairn.train.metrics_log import HeldOut, read_log
from cairn.train.next_batches import (
    NextBatches,
    SourceBatches,
    StatefulBatches,
    check_counts,
)
from cairn.train.precision import MOST_HALVINGS
from cairn.train.state import TrainState
from cairn.train.step import StepResult, train_step
from cairn.train.step_log import Documents, LogLine, OnRecord, StepLog
from cairn.train.stop_signals import interruptible, tolerant
from cairn.train.trainable import check_base
from cairn.train.validation import Validation, in_words

COLLECT_EVERY = 500  # steps between two garbage collections, which otherwise come when they like


class BadRun(CairnError):
    """The loss went wrong too often, or once where the recipe says stop."""

    exit_status = 3


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    first_loss: (
        float | None
    )  # of the whole run, lives before this one included; None: no step was done
    last_loss: float | None
    stopped_early: bool
    bad_steps: int
    seconds: float
    held_out: HeldOut | None = None  # the last measurement of this life
    resumed: int = 0  # the step that this life began with


class Loop:
    """Training loop of a process. All processes of a run call the same methods in the same order."""

    def __init__(
        self,
        state: TrainState,
        source: Source | NextBatches,
        world: int = 1,
        rank: int = 0,
        log_line: LogLine = print,
        on_record: OnRecord = lambda record: None,
    ) -> None:
        self.state, self.world, self.rank = state, world, rank
        self.log_line = tolerant(log_line) if rank == 0 else _silence
        self.config: Train = state.config
        self.root: Path = self.config.folder / "checkpoints"
        saving = self.config.checkpoint
        self.saver = Saver(self.root, saving.keep, saving.in_background)
        self.batches = _next_batches(source, state)
        self.validation: Validation | None = None
        self.held_out: HeldOut | None = None
        self.waiting: deque[tuple[StepResult, Documents]] = deque()
        self.lag = 1 if state.device.type == "cuda" else 0
        self.log = StepLog(state, world, self.log_line, on_record if rank == 0 else _silence)
        self.bad_steps = 0
        self.rewound, self.rewound_to = 0, Path()  # how often to which checkpoint
        self.overflows = 0  # of float16, one after another
        self.saved = -1  # the step of the last checkpoint
        # For the one question that only the host can answer; the checkpoint's thread has its own group.
        self.control = dist.new_group(backend="gloo") if world > 1 else None

    # -- the run ------------------------------------------------------------------------------

    def run(self) -> Outcome:
        began = time.perf_counter()
        self.resume()
        state, config = self.state, self.config
        first = state.step
        if self.rank == 0:
            self.log.open()
        if config.bad_step.action == "rewind" and self.saved < 0:
            self.save()
        try:
            with quiet_collector(), interruptible() as interrupted:
                self.log.read_at = time.perf_counter()
                while state.step < config.steps and not self._anybody(interrupted.is_set()):
                    self._one_step()
                self._read(0)
                if first < state.step == config.steps and self.validation is not None:
                    if self.saved != state.step:
                        self.save()  # whatever happens to the measurement, the weights are kept
                    self._validate()
            self._finish()
        finally:
            self.batches.close()
            self.saver.wait()
            self.log.close()
        losses = self.log.losses
        return Outcome(
            step=state.step,
            first_loss=self._first_loss(first),
            last_loss=losses[-1] if losses else None,
            stopped_early=state.step < config.steps,
            bad_steps=self.bad_steps,
            seconds=time.perf_counter() - began,
            held_out=self.held_out,
            resumed=first,
        )

    def _one_step(self) -> None:
        state = self.state
        before, batches = state.step, self.batches.next_batches(state)
        if self.batches.may_be_empty and self._nobody_has_any(batches):
            instant("empty step", step=state.step)
            state.step += 1
        else:
            lengths = [length for batch in batches for length in batch.lengths]
            prefixes = [length for batch in batches for length in batch.prefix_lengths()]
            self.waiting.append((train_step(state, batches), Documents(lengths, prefixes)))
            # No step follows the last one in which its numbers could be read.
            self._read(self.lag if state.step < self.config.steps else 0)
        if state.step > before:  # otherwise it was a way back, to where all of this has been done
            self._after_step()

    def _after_step(self) -> None:
        """Periodic work, also after steps without batches."""
        state, every = self.state, self.config.checkpoint.every
        done, is_last = state.step, state.step >= self.config.steps
        if done % COLLECT_EVERY == 0:
            gc.collect(1)
        if every and done % every == 0 and not is_last:
            self._read(0)
            if state.step == done:  # not after a rewind
                self.save()
        self._report_problem()  # soon: there may be time to make room before the last save
        if self.validation is not None and self.validation.is_due(done) and not is_last:
            self._read(0)
            if state.step == done:
                self._validate()

    def _validate(self) -> None:
        """Measure on held-out data; its time is not that of a step."""
        if self.validation is None:
            return
        measured = self.held_out = self.validation.measure()
        if measured.loss is not None:
            scalar("held-out loss", measured.loss, step=measured.step)
        self.log.put(measured)
        for line in in_words(measured):
            self.log_line(line)
        self.log.read_at = time.perf_counter()

    def _anybody(self, here: bool) -> bool:
        """Return whether any process requests it, so that all end after the same step."""
        if self.control is None:
            return here
        flag = torch.tensor(float(here))
        dist.all_reduce(flag, group=self.control)
        return bool(flag.item())

    def _nobody_has_any(self, batches: list[Batch]) -> bool:
        """Return whether no data rank has a batch for this step, which then changes nothing."""
        counts = torch.tensor([len(batches), -len(batches)])
        if self.control is not None:
            dist.all_reduce(counts, dist.ReduceOp.MAX, group=self.control)
        most, fewest = int(counts[0]), -int(counts[1])
        check_counts(fewest, most, self.config)
        return most == 0

    # -- checkpoints --------------------------------------------------------------------------

    def resume(self) -> bool:
        """Go on from the newest complete checkpoint, if there is one."""
        warnings: list[str] = []
        newest = choose_newest(self.root, self.saver.group, warnings)
        for warning in warnings:
            self.log_line(f"warning: {warning}")
        if newest is None:
            return False
        self._load(newest)
        if self.rank == 0:  # all have chosen: they have read it together
            folders.set_aside(self.root, self.state.step)
        self.log_line(f"going on from {newest} at step {self.state.step}")
        return True

    def save(self) -> None:
        self.saver.wait()
        self._report_problem()
        self.saver.save(self.state.step, self.state.pieces(), self._about())
        self.saved = self.state.step

    def _about(self) -> dict[str, Any]:
        return self.state.about(self.batches.fingerprint, self.world, self._source_states())

    def _source_states(self) -> list[dict[str, Any]]:
        """States of a stateful source on each data rank; the same list on every process."""
        if not isinstance(self.batches, StatefulBatches):
            return []
        mine = (self.state.parallel.data_rank, self.batches.state_dict())
        gathered: list[Any] = [mine]
        if self.control is not None:
            gathered = [None] * self.world
            dist.all_gather_object(gathered, mine, group=self.control)
        return [state for _, state in sorted(dict(gathered).items())]

    def _restore_source(self, about: About) -> None:
        if isinstance(self.batches, StatefulBatches) and about.source:
            self.batches.load_state_dict(about.source)

    def _load(self, folder: Path, with_source: bool = True) -> None:
        about = read_about(folder)
        check_model(about, self.state.spec, folder)
        check_base(about.base, self.state.base, folder)
        if about.data and about.data != self.batches.fingerprint:
            self.log_line(
                "warning: the data is not that of the checkpoint; the samples will not be those of one run"
            )
        pieces = self.state.pieces()
        load_pieces(folder, pieces)
        self.state.restore(about, pieces)
        if with_source:
            self._restore_source(about)
        self.saved = self.state.step

    def _finish(self) -> None:
        """The last checkpoint has to be on disk, or the run has failed."""
        if self.saved != self.state.step:
            self.save()
        self.saver.wait()
        problem = self.saver.problem()
        if problem is not None:
            raise problem

    def _report_problem(self) -> None:
        problem = self.saver.problem()
        if problem is not None:
            self.saved = -1  # what is not on disk has to be written at the end
            self.log_line(f"warning: {problem.message}; hint: {problem.hint}")

    # -- numbers ------------------------------------------------------------------------------

    def _read(self, behind: int) -> None:
        """Look at all steps but the last `behind`."""
        while len(self.waiting) > behind:
            result, documents = self.waiting.popleft()
            loss, norm = result.loss.item(), result.norm.item()
            judged = self._judged(loss, norm)
            verdict = self.state.watch.judge(loss, judged, result.limit, result.valid.item())
            self.log.note(result, documents, loss, norm, verdict, len(self.waiting))
            if verdict.action != "go on":
                self._bad(result, loss, verdict)

    def _first_loss(self, resumed: int) -> float | None:
        losses = self.log.losses
        if not losses or not resumed or self.rank != 0:
            return losses[0] if losses else None
        before = [record for record in read_log(self.config.folder) if record.step <= resumed]
        return next((one.loss for one in before if one.loss is not None), losses[0])

    def _judged(self, loss: float, norm: float) -> float:
        """An overflow of float16 is the business of its loss scale, while that can still be halved."""
        if not self.state.scale.active or not math.isfinite(loss):
            return norm
        self.overflows = 0 if math.isfinite(norm) else self.overflows + 1
        return 0.0 if self.overflows <= MOST_HALVINGS else norm

    def _bad(self, result: StepResult, loss: float, verdict: Verdict) -> None:
        self.bad_steps += 1
        instant("bad step", step=result.step, action=verdict.action, why=verdict.why)
        name = "bad_steps.jsonl" if self.world == 1 else f"bad_steps.{self.rank}.jsonl"
        path = self.config.folder / name
        what = f"step {result.step + 1}: {verdict.why} (samples in {path})"
        try:
            write_down(path, result.step + 1, verdict, loss, result.ids)
        except OSError as error:  # a rank that ended here would leave the others waiting
            why = error.strerror or error
            what = f"step {result.step + 1}: {verdict.why} (samples {result.ids}, not in {path}: {why})"
        if verdict.action == "stop":
            raise BadRun(what, hint=self._way_out(self.config.bad_step.action))
        self.log_line(f"warning: {what}; {verdict.action}")
        if verdict.action == "rewind":
            self._rewind(what)

    def _way_out(self, action: str) -> str:
        """Hint after a stop by the bad-step policy."""
        last = "set bad_step.action to skip" if action == "stop" else "begin again from before them"
        look = f"look at those samples (cairn data sample {self.config.folder} N)"
        return f"{look}, lower the rate, or {last}"

    def _rewind(self, what: str) -> None:
        """Weights, states and step of the last checkpoint; the samples after the bad ones."""
        self.saver.wait()
        self.waiting.clear()
        newest = choose_newest(self.root, self.saver.group, [])
        if newest is None:
            raise DataError("there is no checkpoint to rewind to", hint="set checkpoint.every")
        # Good steps between two bad ones are no progress while no new checkpoint comes of them.
        self.rewound = self.rewound + 1 if newest == self.rewound_to else 1
        self.rewound_to = newest
        if self.rewound >= self.config.bad_step.most:
            raise BadRun(
                f"{what}; {self.rewound} times back to {newest.name}, which helps no more",
                hint=self._way_out("rewind"),
            )
        samples, streak = self.state.samples, self.state.watch.in_a_row
        self._load(newest, with_source=False)  # it goes on behind the bad samples
        self.state.samples, self.state.watch.in_a_row = samples, streak
        self.log.rewind()
        self.log_line(f"back at step {self.state.step}, going on with the samples from {samples}")


def _next_batches(source: Source | NextBatches, state: TrainState) -> NextBatches:
    if isinstance(source, NextBatches):
        return source
    parallel = state.parallel
    return SourceBatches(
        source, state.config, parallel.data_rank, parallel.data_ranks, state.device
    )


def _silence(_: object) -> None:
    pass
