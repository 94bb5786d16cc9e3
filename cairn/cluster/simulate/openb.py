"""Alibaba's public trace of a cluster where pods share GPUs ("openb", 2023): its two files, read into columns.

    nodes   sn,cpu_milli,memory_mib,gpu,model
    pods    name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,...,creation_time,deletion_time

A pod asks for thousandths of one GPU, or for whole GPUs. Knows what the files say, and not what is done with it.
"""

import csv
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from cairn.core.errors import DataError

MILLI = 1000  # of a GPU
Column = NDArray[np.int64]


class OpenbNodes(msgspec.Struct, frozen=True):
    cpu: Column  # thousandths of a core
    memory: Column  # MiB
    gpus: Column

    def __len__(self) -> int:
        return len(self.gpus)


class Pods(msgspec.Struct, frozen=True):
    cpu: Column
    memory: Column
    count: Column  # GPUs
    milli: Column  # thousandths of each of them
    created: Column  # seconds
    deleted: Column

    def __len__(self) -> int:
        return len(self.count)

    def demand(self) -> Column:
        """Thousandths of GPUs that each pod asks for."""
        return self.count * self.milli


def read_nodes(path: Path) -> OpenbNodes:
    cpu, memory, gpus = _columns(path, ("cpu_milli", "memory_mib", "gpu"))
    if not gpus.sum():
        raise DataError(f"{path} has no node with GPUs", hint="give the list of GPU nodes")
    return OpenbNodes(cpu, memory, gpus)


def read_pods(path: Path) -> Pods:
    names = ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli", "creation_time", "deletion_time")
    cpu, memory, count, milli, created, deleted = _columns(path, names)
    bad = np.flatnonzero(
        (milli > MILLI) | ((count > 1) & (milli < MILLI)) | ((count == 1) & (milli == 0))
    )
    if len(bad):
        at = int(bad[0])
        raise DataError(
            f"{path} line {at + 2}: {count[at]} GPUs with {milli[at]}/1000 of each",
            hint="a pod shares one GPU (gpu_milli 1..999), or takes whole ones (gpu_milli 1000)",
        )
    if not (count * milli).any():
        raise DataError(f"no pod of {path} asks for a GPU", hint="give the list of GPU pods")
    return Pods(cpu, memory, count, milli, created, deleted)


def is_openb_pods(header: list[str]) -> bool:
    return {"num_gpu", "gpu_milli", "cpu_milli"} <= set(header)


def _columns(path: Path, names: tuple[str, ...]) -> list[Column]:
    values: dict[str, list[int]] = {name: [] for name in names}
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = set(names) - set(reader.fieldnames or [])
            if missing:
                raise DataError(
                    f"{path} has no column {', '.join(sorted(missing))}",
                    hint="the openb trace has a list of nodes and a list of pods; is it the other one?",
                )
            for row in reader:
                for name in names:
                    text = row[name] or ""  # a line that is cut off has none
                    if not text.isdecimal():
                        raise DataError(
                            f"{path} line {reader.line_num}: {name} is {text!r}, not a whole number from 0 on",
                            hint="the file is damaged",
                        )
                    values[name].append(int(text))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {error}", hint="give a CSV file") from None
    columns = [np.array(values[name], dtype=np.int64) for name in names]
    if not len(columns[0]):
        raise DataError(f"{path} has no rows", hint="the file is cut off")
    return columns
