"""Weights in CTranslate2's file, model.bin, as faster-whisper's users have them.

    u32 version | text kind | u32 revision | u32 count | count x variable | u32 count | count x (alias, name)
    variable: text name | u8 rank | u32 x rank shape | u8 type | u32 bytes | bytes
    text: u16 length, a zero byte included | bytes

Numbers are little-endian. A matrix in 8 bits has a scale for each row beside it. A file may lie in several parts,
model.bin.part1 in one folder and model.bin.part2 in one that is called likewise.
"""

import struct
from pathlib import Path

import torch
from torch import Tensor

from cairn.core.errors import UnsupportedModel, WeightsError

DTYPES = {
    0: torch.float32,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.float16,
    5: torch.bfloat16,
}
VERSIONS = range(4, 7)
MOST_DIMENSIONS = 4


def is_ctranslate2(folder: Path) -> bool:
    return any(folder.glob("model.bin*")) and not (folder / "model.safetensors").is_file()


def read_variables(folder: Path) -> dict[str, Tensor]:
    """All tensors by name, in floating point."""
    reader = _Reader(_joined(folder), str(folder / "model.bin"))
    version = reader.number("<I")
    if version not in VERSIONS:
        raise UnsupportedModel(
            f"{reader.where} is of version {version}", hint="versions 4 to 6 are read"
        )
    kind = reader.text()
    if kind != "WhisperSpec":
        raise UnsupportedModel(f"{reader.where} holds a {kind}", hint="Whisper is supported")
    reader.number("<I")  # revision of the kind
    variables = dict(reader.variable() for _ in range(reader.number("<I")))
    for _ in range(reader.number("<I")):
        alias, name = reader.text(), reader.text()
        variables[alias] = variables[name]
    return _dequantised(variables)


def _joined(folder: Path) -> bytes:
    if (folder / "model.bin").is_file():
        return (folder / "model.bin").read_bytes()
    parts = []
    for number in range(1, 100):
        home = Path(str(folder).replace("part1", f"part{number}"))
        path = home / f"model.bin.part{number}"
        if not path.is_file():
            break
        parts.append(path.read_bytes())
    if not parts:
        raise WeightsError(f"no model.bin in {folder}", hint="give a folder that has one")
    return b"".join(parts)


def _dequantised(variables: dict[str, Tensor]) -> dict[str, Tensor]:
    """8-bit rows divided by their scale; scales are left out."""
    tensors = {}
    for name, tensor in variables.items():
        if name.endswith("_scale"):
            continue
        scale = variables.get(f"{name}_scale")
        if tensor.dtype == torch.int8 and scale is not None:
            tensor = tensor.float() / scale.float().reshape(-1, *[1] * (tensor.dim() - 1))
        elif tensor.dtype == torch.int16 and scale is not None:
            raise UnsupportedModel(
                f"{name} is stored in 16-bit integers", hint="float16, float32 and int8 are read"
            )
        tensors[name] = tensor
    return tensors


class _Reader:
    """A place in the file; whatever does not fit is an error that says where."""

    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.where, self.at = data, where, 0

    def take(self, count: int) -> bytes:
        end = self.at + count
        if count < 0 or end > len(self.data):
            raise WeightsError(
                f"{self.where} ends at byte {len(self.data)}, and {count} more are needed at {self.at}",
                hint="the file is truncated: download it again",
            )
        self.at, start = end, self.at
        return self.data[start:end]

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self) -> str:
        raw = self.take(self.number("<H"))
        return raw.rstrip(b"\0").decode("utf-8", "replace")

    def variable(self) -> tuple[str, Tensor]:
        name, rank = self.text(), self.number("<B")
        if rank > MOST_DIMENSIONS:
            raise WeightsError(f"{self.where}: {name!r} has {rank} dimensions")
        shape = [self.number("<I") for _ in range(rank)]
        kind, size = self.number("<B"), self.number("<I")
        if kind not in DTYPES:
            raise WeightsError(f"{self.where}: {name!r} is of type {kind}")
        raw = self.take(size)
        expected = DTYPES[kind].itemsize * int(torch.Size(shape).numel())
        if size != expected:
            raise WeightsError(f"{self.where}: {name!r} has {size} bytes, expected {expected}")
        if not size:
            return name, torch.zeros(shape, dtype=DTYPES[kind])
        return name, torch.frombuffer(bytearray(raw), dtype=DTYPES[kind]).reshape(shape)
