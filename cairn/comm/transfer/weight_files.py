"""Reads a checkpoint into another layout: each rank reads from the files only the bytes of its own shards.

    shards = stored_in([path, ...])                     every tensor of every safetensors file, at its byte
    memory = read_from(paths, pack(rank, cuts))         the ranges of a plan, by `preadv`

The files are ranks that hold everything (see `weights`), so the planner that moves weights between machines says what
to read: merged runs, every byte once. Number types must agree; nothing is converted. Needs no torch.
"""

import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from cairn.comm.transfer.copies import Bytes
from cairn.comm.transfer.errors import TransferError
from cairn.comm.transfer.plan import Leg, make_plan
from cairn.comm.transfer.shard import TensorShard
from cairn.comm.transfer.weights import PackedWeightShards, stored

LENGTH = struct.Struct("<Q")
MOST_HEADER = 100 << 20  # bytes: safetensors' own limit
MOST_PIECES = 512  # of one preadv; the kernel takes 1,024


def stored_in(paths: Sequence[Path]) -> list[TensorShard]:
    """Every tensor of the files; the place of a file in the list is its rank."""
    return [shard for rank, path in enumerate(paths) for shard in _stored(path, rank)]


def read_from(paths: Sequence[Path], target: PackedWeightShards) -> Bytes:
    """The memory of one rank, as `wanted` lays it out."""
    sources = stored_in(paths)
    sizes = {shard.tensor: shard.itemsize for shard in sources}
    for shard in target.shards:
        if sizes.get(shard.tensor, shard.itemsize) != shard.itemsize:
            raise TransferError(
                f"{shard.tensor} has {sizes[shard.tensor]} bytes for each element in the files, "
                f"{shard.itemsize} are wanted",
                hint="load it in the type it was saved in, and convert then",
            )
    memory = np.zeros(target.nbytes, np.uint8)
    for leg in make_plan(sources, target.shards).legs:
        _read(paths[leg.source_rank], leg, memory)
    return memory


def _stored(path: Path, rank: int) -> list[TensorShard]:
    header, begin, end = _header(path)
    shards = []
    for name, about in header.items():
        if name == "__metadata__":
            continue
        try:
            first, last = about["data_offsets"]
            shape, elements = list(about["shape"]), math.prod(about["shape"])
            size = (last - first) // elements if elements else 1
        except (KeyError, TypeError, ValueError) as error:
            raise TransferError(f"{path}: {name} is described wrongly: {error!r}") from None
        if size * elements != last - first or begin + last > end or first < 0:
            raise TransferError(
                f"{path}: {name} of shape {shape} at bytes {first:,} to {last:,} of {end - begin:,}",
                hint="the file is cut off, or of a format with several elements in a byte",
            )
        if elements:
            shards.append(stored(name, shape, size, rank, str(path), begin + first))
    return shards


def _header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Read the header of a safetensors file; returns it with the start and the end of the data."""
    try:
        with path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            lead = file.read(LENGTH.size)
            length = LENGTH.unpack(lead)[0] if len(lead) == LENGTH.size else MOST_HEADER + 1
            if length > min(MOST_HEADER, end):
                raise TransferError(f"{path} is no safetensors file", hint="give model.safetensors")
            header = msgspec.json.decode(file.read(length), type=dict[str, Any])
    except OSError as error:
        raise TransferError(f"cannot read {path}: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise TransferError(f"{path} is no safetensors file: {error}") from None
    return header, LENGTH.size + length, end


def _read(path: Path, leg: Leg, memory: Bytes) -> None:
    """Runs that follow each other in the file are one call."""
    source, target, sizes = (
        column.tolist() for column in (leg.runs.source, leg.runs.target, leg.runs.sizes)
    )
    fd = os.open(path, os.O_RDONLY)
    try:
        at = 0
        while at < len(sizes):
            last = at + 1
            while (
                last < len(sizes)
                and last - at < MOST_PIECES
                and source[last] == source[last - 1] + sizes[last - 1]
            ):
                last += 1
            parts = [memory[target[i] : target[i] + sizes[i]] for i in range(at, last)]
            expected_bytes = sum(sizes[at:last])
            if _whole(fd, parts, source[at]) != expected_bytes:
                raise TransferError(f"{path} ended while it was read", hint="is it being written?")
            at = last
    finally:
        os.close(fd)


def _whole(fd: int, parts: list[Bytes], offset: int) -> int:
    """Bytes that were read; the kernel may return fewer than requested, so the read is repeated."""
    read_bytes = os.preadv(fd, parts, offset)  # pyrefly: ignore
    total = sum(part.nbytes for part in parts)
    while 0 < read_bytes < total:
        skip, rest = read_bytes, []
        for part in parts:
            if skip < part.nbytes:
                rest.append(part[skip:])
            skip = max(skip - part.nbytes, 0)
        more = os.preadv(fd, rest, offset + read_bytes)  # pyrefly: ignore
        if more == 0:
            break
        read_bytes += more
    return read_bytes
