"""Tells torch's distributed checkpoint about pieces: who writes which rectangle, and who needs which.

Torch does the rest: one file per rank, duplicates written once, and on reading the bytes of a rectangle from
whatever rectangles were written. So any layout reads what any other has saved. Knows nothing about steps or folders.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from cairn.core.errors import DataError
from cairn.train.checkpoint.piece import Piece


class SavePieces(DefaultSavePlanner):
    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = pieces

    def create_local_plan(self) -> SavePlan:
        items = [
            _written(name, piece) for name, piece in self.pieces.items() if piece.tensor.numel()
        ]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.pieces[index.fqn].tensor


class ShardWriter(FileSystemWriter):
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Raises what the operating system has said, where torch's own error, `unexpected pos 704 vs 598`, hides it."""
        try:
            return super().write_data(plan, planner)
        except Exception as error:  # noqa: BLE001  raised again
            hidden: BaseException | None = error
            while hidden is not None and not isinstance(hidden, OSError):
                hidden = hidden.__cause__ or hidden.__context__
            raise hidden or error from None


class LoadPieces(DefaultLoadPlanner):
    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        stored_metadata = self.metadata.state_dict_metadata if self.metadata is not None else {}
        items = []
        for name, piece in self.pieces.items():
            stored = _checked(name, piece, stored_metadata.get(name))
            if piece.tensor.numel():
                items += create_read_items_for_chunk_list(name, stored, [_chunk(piece)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self.pieces[index.fqn].tensor


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.size())


def _written(name: str, piece: Piece) -> WriteItem:
    chunk = _chunk(piece)
    properties = TensorProperties.create_from_tensor(piece.tensor)
    data = TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(piece.shape))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _checked(name: str, piece: Piece, stored: Any) -> TensorStorageMetadata:
    hint = "was it written with another model, optimizer or precision?"
    if not isinstance(stored, TensorStorageMetadata):
        raise DataError(f"the checkpoint has no {name}", hint=hint)
    if tuple(stored.size) != piece.shape:
        raise DataError(
            f"{name} is {list(stored.size)} in the checkpoint, {list(piece.shape)} here", hint=hint
        )
    if stored.properties.dtype != piece.tensor.dtype:
        raise DataError(
            f"{name} is {stored.properties.dtype} in the checkpoint, {piece.tensor.dtype} here",
            hint=hint,
        )
    return stored
