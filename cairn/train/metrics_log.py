"""What a run says about itself, step by step: log.jsonl, and whoever else wants to hear it.

    {"step":10,"loss":3.21,"norm":0.8,"lr":0.0003,"tokens":20480,"tokens_per_s":51200.0,"mfu":0.41,...}

One line per logged step. A resumed run first drops the lines of steps that it will do again, so that the file reads
like that of an unbroken run. TensorBoard and Weights & Biases get the same numbers where they are asked for and
installed.
"""

import errno
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from cairn.core.errors import ConfigError, DataError
from cairn.train.config import Log

FILE = "log.jsonl"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One step, as it is logged."""

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


class Sink(Protocol):
    def put(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    def __init__(self, folder: Path, from_step: int) -> None:
        """`from_step`: updates that are done already; later lines belong to a life that was lost."""
        self.path = folder / FILE
        kept = [record for record in read_log(folder) if record.step <= from_step]
        fresh = self.path.with_name(f".{FILE}")
        fresh.write_bytes(b"".join(_line(record) for record in kept))
        fresh.replace(self.path)
        self.file = self.path.open("ab", buffering=0)

    def put(self, record: Record) -> None:
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

        self.writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def put(self, record: Record) -> None:
        for name, value in _numbers(record).items():
            self.writer.add_scalar(name, value, record.step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        import wandb  # pyrefly: ignore[missing-import]

        self.run: Any = wandb.init(dir=str(folder), name=folder.name, config=config, resume="allow")

    def put(self, record: Record) -> None:
        self.run.log(_numbers(record), step=record.step)

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
    """All lines of a run; a last line that was cut off by the end of its process is left out."""
    path = folder / FILE
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(msgspec.json.decode(line, type=Record))
        except msgspec.DecodeError as error:
            if number == len(lines):
                break
            raise DataError(
                f"{path} line {number}: {error}", hint="remove the line, or begin another run"
            ) from None
    return records


def smoothed(records: Sequence[Record], share: float = 0.1) -> list[tuple[float, float]]:
    """The loss as an exponential mean, for the eye."""
    points: list[tuple[float, float]] = []
    mean: float | None = None
    for record in records:
        if record.loss is not None:
            mean = record.loss if mean is None else (1 - share) * mean + share * record.loss
            points.append((record.step, mean))
    return points


def _line(record: Record) -> bytes:
    return msgspec.json.encode(record) + b"\n"


def _numbers(record: Record) -> dict[str, float]:
    values = msgspec.to_builtins(record)
    return {n: float(v) for n, v in values.items() if isinstance(v, int | float) and n != "step"}
