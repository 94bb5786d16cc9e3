"""GGUF file presented as a Hugging Face checkpoint.

The same names, shapes and values as the checkpoint that was converted, and its config.json, so that
nothing above this file knows about GGUF. The file is mapped, not read: opening costs the header, a
tensor costs its own bytes. It knows how ggml stores numbers; it does not know the container
(`header`), models (`config`, `tensor_names`) or tokenizers, which others make of metadata.

    file -header-> metadata -config-> config()
                   tensors  -names--> names() -dequantize, undo-> tensor()
"""

import mmap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

import numpy as np
import torch

from cairn.core.errors import WeightsError
from cairn.kernels.cpu.packed_product import TYPES, Blocks
from cairn.models.gguf.block_types import BlockType
from cairn.models.gguf.config import hf_config
from cairn.models.gguf.header import GGUFHeader, StoredTensor, read_header
from cairn.models.gguf.keys import ROPE_FACTORS
from cairn.models.gguf.tensor_names import GGUFSource, hf_sources
from cairn.models.gguf.value_transforms import join_key_heads, join_latent, undo
from cairn.models.quantized.gguf_blocks import BLOCKS, block_planes
from cairn.models.quantized.planes import Planes
from cairn.models.quantized.sharding import rows_in_order
from cairn.models.quantized.source import PlanesShape

_UNQUANTISED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MOST_ROPE_FACTORS = 4096
_PIECE_ELEMENTS = 1 << 20  # dequantised at once: bounds the temporaries at some 4 MB each


class GGUFFile:
    """Tensors of one open file. Unquantised ones are views of the mapping: copy before writing."""

    metadata: Mapping[str, object]  # plain Python values, by GGUF's keys

    def __init__(self, path: Path, dequantize_to: torch.dtype = torch.float32) -> None:
        self.path = path
        self._dequantize_to = dequantize_to
        self._mapping: mmap.mmap | None = _map(path)
        self._header = read_header(path, self._mapping)
        self._bytes: np.ndarray | None = np.frombuffer(self._mapping, np.uint8)
        self._taken = False  # the long lists of the metadata
        _refuse_unreadable(self._header)
        self.metadata = MappingProxyType(self._header.metadata)
        self._config = hf_config(self._header, self._rope_factors())
        self._sources = hf_sources(self._header, self._config)

    def config(self) -> dict[str, object]:
        """The equivalent config.json."""
        return dict(self._config)

    def names(self) -> list[str]:
        return list(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype that `tensor` returns: as stored, or `dequantize_to` for quantised tensors."""
        block = self._source(name).stored.block
        return _UNQUANTISED.get(block.name, self._dequantize_to)

    def bits(self, name: str) -> float:
        """Stored bits per value including scales: 4.5 for Q4_0."""
        block = self._source(name).stored.block
        return 8 * block.size_bytes / block.elements

    def common_type(self) -> str:
        """The type that has the most bytes, as llama.cpp calls it: Q4_K."""
        sizes: dict[str, int] = {}
        for source in self._sources.values():
            name = source.stored.block.name
            sizes[name] = sizes.get(name, 0) + source.size_bytes
        return max(sizes, key=lambda name: sizes[name])

    def tensor(self, name: str) -> torch.Tensor:
        source = self._source(name)
        values = self._read(source)
        if source.joined is None:
            return undo(source.change, values)
        rest = self._read(source.joined)
        if source.key_heads:
            return join_key_heads(values, rest, source.key_heads)
        return join_latent(values, rest)

    def has_blocks(self, name: str) -> bool:
        """Return whether this tensor is a matrix in a block format with a CPU matmul."""
        source = self._source(name)
        known = source.stored.block.name in TYPES
        return source.in_rows and len(source.shape) == 2 and known

    def blocks(self, name: str) -> Blocks:
        """A view of the mapped file; a copy where the rows are in another order there."""
        source = self._source(name)
        rows, columns = source.shape
        bytes_NB = torch.from_numpy(self._raw(source)).view(rows, -1)
        kept = source.change.nothing
        values = undo(source.change, bytes_NB)
        if not kept:
            self._let_go(source)
        return Blocks(source.stored.block.name, values, columns, mapped=kept)

    def planes_shape(self, name: str) -> PlanesShape | None:
        """Shape of a matrix that can stay packed; None if it is dequantised."""
        source = self._source(name)
        block = source.stored.block
        kept = source.in_rows and len(source.shape) == 2
        if not kept or block.name not in BLOCKS:
            return None
        return PlanesShape(block.name, 16 if block.name == "Q6_K" else 32, False)

    def planes(self, name: str, device: torch.device | str) -> Planes:
        """A quantised matrix with its numbers as they are stored."""
        source, rows = self._source(name), self.shape(name)[0]
        block = source.stored.block
        raw_NC = torch.from_numpy(self._raw(source)).view(rows, -1).to(device)
        planes = block_planes(raw_NC, block.name, block.size_bytes)
        if source.change.nothing:
            return planes
        order_N = undo(source.change, torch.arange(rows)[:, None])[:, 0]
        return rows_in_order(planes, order_N.to(device))

    def source(self, name: str) -> GGUFSource:
        """Source of a tensor: its location, and the transformation that llama.cpp applied."""
        return self._source(name)

    def take_metadata(self) -> Mapping[str, object]:
        """All of it. A vocabulary takes tens of megabytes as strings: it is given away, and read again later."""
        if self._taken:
            return read_header(self.path, _map(self.path)).metadata
        self._taken, metadata = True, dict(self._header.metadata)
        for key in [key for key, value in metadata.items() if isinstance(value, list)]:
            del self._header.metadata[key]
        return metadata

    def close(self) -> None:
        """Tensors that are views keep the mapping alive until they are gone."""
        self._bytes = self._mapping = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _source(self, name: str) -> GGUFSource:
        source = self._sources.get(name)
        if source is None:
            raise WeightsError(
                f"{self.path} has no tensor {name}",
                hint=f"it has {len(self._sources)}: names() lists them",
            )
        return source

    def _read(self, source: GGUFSource) -> torch.Tensor:
        raw = self._raw(source)
        block = source.stored.block
        if (dtype := _UNQUANTISED.get(block.name)) is not None:
            return torch.from_numpy(raw).view(dtype).view(source.stored_shape)
        values = torch.empty(source.stored_shape, dtype=self._dequantize_to)
        _dequantize(raw.reshape(-1, block.size_bytes), block, values.view(-1, block.elements))
        return values

    def _raw(self, source: GGUFSource) -> np.ndarray:
        if self._bytes is None:
            raise ValueError(f"{self.path} is closed")
        return self._bytes[source.start : source.start + source.size_bytes]

    def _let_go(self, source: GGUFSource) -> None:
        """Whole pages of a tensor that was copied leave this process; they are read again when they are needed."""
        first = -(-source.start // mmap.PAGESIZE) * mmap.PAGESIZE
        size = source.start + source.size_bytes - first
        if self._mapping is not None and size > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED, first, size)

    def _rope_factors(self) -> dict[str, list[float]]:
        """RoPE frequency factors by tensor name; they become part of the config."""
        return {name: self._factors(name) for name in ROPE_FACTORS if name in self._header.tensors}

    def _factors(self, name: str) -> list[float]:
        stored = self._header.tensors[name]
        if len(stored.shape) != 1 or stored.shape[0] > _MOST_ROPE_FACTORS:
            raise WeightsError(
                f"{self.path} has {name} of shape {stored.shape}, not one per frequency",
                hint="the file is damaged: fetch it again",
            )
        whole = GGUFSource(stored, stored.start, stored.size_bytes, stored.shape)
        return self._read(whole).float().tolist()


def _map(path: Path) -> mmap.mmap:
    """Copy on write: a caller's slip changes its own memory, neither the file nor the process."""
    try:
        if path.stat().st_size == 0:
            raise WeightsError(f"{path} is empty", hint="fetch it again")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise WeightsError(
            f"{path} cannot be opened: {error.strerror}", hint="give the path of a .gguf file"
        ) from None


def _refuse_unreadable(header: GGUFHeader) -> None:
    """Check before loading that every tensor type in the file can be dequantised."""
    first_with: dict[BlockType, StoredTensor] = {}
    for stored in header.tensors.values():
        first_with.setdefault(stored.block, stored)
    for block, stored in first_with.items():
        if block.name in _UNQUANTISED or block.name in TYPES:
            continue
        try:
            _dequantize_piece(np.zeros((1, block.size_bytes), np.uint8), block)
        except (NotImplementedError, ValueError):  # a type that the package does not know
            raise WeightsError(
                f"{header.path} has tensor {stored.name!r} in {block.name}, which cannot be read",
                hint="upgrade the gguf package, or use another quantisation",
            ) from None


def _dequantize(raw_NB: np.ndarray, block: BlockType, values_NE: torch.Tensor) -> None:
    """N blocks of B bytes into N blocks of E values. Threads were tried and made it no faster."""
    if block.name == "Q8_0":  # a float16 and 32 levels: torch is ten times as fast as the package
        scale_N1 = torch.from_numpy(raw_NB[:, :2].copy()).view(torch.float16).float()
        values_NE.copy_(torch.from_numpy(raw_NB[:, 2:]).view(torch.int8)).mul_(scale_N1)
        return
    step = max(_PIECE_ELEMENTS // block.elements, 1)
    for first in range(0, len(raw_NB), step):
        piece = _dequantize_piece(raw_NB[first : first + step], block)
        values_NE[first : first + step] = torch.from_numpy(piece)


def _dequantize_piece(raw_NB: np.ndarray, block: BlockType) -> np.ndarray:
    try:  # not at the top: a file whose types all have kernels does without the package
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError:
        raise WeightsError(
            f"{block.name} is dequantised by the gguf package, which is not installed",
            hint="pip install gguf",
        ) from None

    with np.errstate(all="ignore"):  # a NaN in the file is the model's, not ours to warn about
        flat = dequantize(raw_NB.reshape(1, -1), GGMLQuantizationType(block.code))
    return flat.reshape(len(raw_NB), block.elements)
