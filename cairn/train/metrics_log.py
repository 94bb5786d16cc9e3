"""Metrics of a run by step: two JSON-lines files and the other sinks of the recipe.

    log.jsonl          {"step":10,"loss":3.21,"norm":0.8,"lr":0.0003,"tokens":20480,"tokens_per_s":51200.0,...}
    validation.jsonl   {"step":80,"loss":3.05,"bits_per_byte":1.21,"tokens":16384,"seconds":0.4,"texts":[...]}

One line per logged step, and one per measurement on held-out data. A run that is resumed or goes back to a checkpoint
drops the lines of steps that it will do again, so that the files read like those of an unbroken run. TensorBoard and
Weights & Biases get the same numbers where they are asked for and installed.
"""

import errno
import importlib.util
import os
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from cairn.core.errors import ConfigError, DataError
from cairn.train.config import Log

FILE, HELD_OUT_FILE = "log.jsonl", "validation.jsonl"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Log record of a step."""

    step: int  # updates done, so the first is 1
    loss: float | None  # None where it was not finite, which JSON cannot say
    norm: float | None
    lr: float
    tokens: int  # seen since the beginning, by all ranks
    seconds: float  # of this step
    tokens_per_s: float
    mfu: float | None = None  # of the vendor's peak; None where that is not known
    of_measured: float | None = None  # of the rate that `cairn calibrate` has measured
    peak_gib: float | None = None  # of memory on this rank's device
    bad: str = ""  # why the step was skipped
    # Of the objective: the share of pairs whose better answer is preferred, ...
    metrics: dict[str, float] = {}


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """Validation record of a step."""

    step: int
    # Nats per token; None where no data is kept apart, or it is not finite.
    loss: float | None = None
    bits_per_byte: float | None = None  # None where the tokens have no text
    serving_kl: float | None = None  # nats a token to the model that would be served
    tokens: int = 0  # that were measured
    seconds: float = 0.0
    texts: list[str] = []  # continuations of the prompts of the recipe
    by_source: dict[str, float | None] = {}  # loss on each source of a blend


Line = Record | HeldOut
Kind = TypeVar("Kind", bound=Line)


class Sink(Protocol):
    def put(self, record: Line) -> None: ...

    def rewind(self, step: int) -> None:
        """The run goes back to where `step` updates are done."""
        ...

    def close(self) -> None: ...


class JsonLines:
    """Both files of lines in the folder of a run."""

    def __init__(self, folder: Path, from_step: int) -> None:
        """`from_step`: updates that are done already; later lines belong to a life that was lost."""
        self.files = {
            Record: _LinesFile(folder / FILE, Record, from_step),
            HeldOut: _LinesFile(folder / HELD_OUT_FILE, HeldOut, from_step),
        }

    def put(self, record: Line) -> None:
        self.files[type(record)].put(record)

    def rewind(self, step: int) -> None:
        for file in self.files.values():
            file.rewind(step)

    def close(self) -> None:
        for file in self.files.values():
            file.close()


class _LinesFile:
    def __init__(self, path: Path, kind: type[Line], from_step: int) -> None:
        self.path, self.kind = path, kind
        self.file = self._cut(from_step)

    def rewind(self, step: int) -> None:
        before, self.file = self.file, self._cut(step)
        before.close()

    def _cut(self, step: int) -> FileIO:
        """The file, open at its end, with the lines up to this step."""
        kept = [record for record in _read(self.path, self.kind) if record.step <= step]
        fresh = self.path.with_name(f".{self.path.name}")
        fresh.write_bytes(b"".join(_line(record) for record in kept))
        fresh.replace(self.path)
        return self.path.open("ab", buffering=0)

    def put(self, record: Line) -> None:
        line, end = _line(record), self.path.stat().st_size
        try:
            if self.file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self.file.truncate(end)  # half a line would spoil those that follow
            raise

    def close(self) -> None:
        os.fsync(self.file.fileno())
        self.file.close()


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.writer_of = str(folder / "tensorboard"), SummaryWriter
        self.writer: Any = SummaryWriter(self.folder)

    def put(self, record: Line) -> None:
        for name, value in numbers(record).items():
            self.writer.add_scalar(name, value, record.step)
        for place, text in enumerate(getattr(record, "texts", [])):
            self.writer.add_text(f"validation/text {place}", text, record.step)

    def rewind(self, step: int) -> None:
        """TensorBoard hides what a writer before said about later steps."""
        self.writer.close()
        self.writer = self.writer_of(self.folder, purge_step=step + 1)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        import wandb  # pyrefly: ignore[missing-import]

        self.run: Any = wandb.init(dir=str(folder), name=folder.name, config=config, resume="allow")

    def put(self, record: Line) -> None:
        self.run.log(numbers(record), step=record.step)

    def rewind(self, step: int) -> None:
        """W&B takes no step twice: it warns, and keeps the numbers that it has."""

    def close(self) -> None:
        self.run.finish()


def check_sinks(log: Log) -> None:
    """Refuse what is not installed, before anything is loaded."""
    for package in ("tensorboard", "wandb"):
        if getattr(log, package) and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"log.{package} is on, but the package {package} is not installed",
                hint=f"pip install {package}, or switch it off",
            )


def open_sinks(folder: Path, log: Log, from_step: int, config: dict[str, Any]) -> list[Sink]:
    check_sinks(log)
    others: list[Sink] = []
    if log.tensorboard:
        others.append(TensorBoard(folder))
    if log.wandb:
        others.append(WeightsAndBiases(folder, config))
    return [JsonLines(folder, from_step), *others]


def read_log(folder: Path) -> list[Record]:
    """All logged steps of a run."""
    return _read(folder / FILE, Record)


def read_held_out(folder: Path) -> list[HeldOut]:
    """All measurements on held-out data."""
    return _read(folder / HELD_OUT_FILE, HeldOut)


def _read(path: Path, kind: type[Kind]) -> list[Kind]:
    """All lines of a file; a last one that was cut off by the end of its process is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(msgspec.json.decode(line, type=kind))
        except msgspec.DecodeError as error:
            if number == len(lines):
                break
            raise DataError(
                f"{path} line {number}: {error}", hint="remove the line, or begin another run"
            ) from None
    return records


def smoothed(records: Sequence[Record], share: float = 0.1) -> list[tuple[float, float]]:
    """The loss as an exponential mean, for the eye; the first losses count as much as all others."""
    points: list[tuple[float, float]] = []
    total = weight = 0.0
    for record in records:
        if record.loss is not None:
            total = (1 - share) * total + share * record.loss
            weight = (1 - share) * weight + share
            points.append((record.step, total / weight))
    return points


def numbers(record: Line) -> dict[str, float]:
    """Values by name for other tools; those of held-out data are under validation/."""
    values = msgspec.to_builtins(record)
    prefix = ""
    if isinstance(record, HeldOut):
        prefix = "validation/"
        values |= {f"loss of {name}": loss for name, loss in record.by_source.items()}
    return {
        prefix + name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and name != "step"
    }


def _line(record: Line) -> bytes:
    return msgspec.json.encode(record) + b"\n"
