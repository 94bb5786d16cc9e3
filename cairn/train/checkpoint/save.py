"""Writes the state of a run beside the training: a quick copy first, the disk after.

    state --copy to the host--> staged --thread--> files --all ranks done--> COMPLETE --> older ones removed
                 `-- training goes on here

One save at a time: the next one waits for the one before. A save that fails (disk full) leaves nothing behind, keeps
the older checkpoints and is told once, by `problem`; the run goes on. Knows nothing about what the state means.
"""

import contextlib
import errno
import shutil
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from cairn.core.errors import CairnError
from cairn.core.events import span
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.piece import Piece
from cairn.train.checkpoint.planner import SavePieces


class NotSaved(CairnError):
    """A checkpoint is not on disk. Nothing is wrong with what was asked: with room, it would be."""

    exit_status = 1


class Saver:
    """Used by all ranks alike; rank 0 writes what is not a tensor."""

    def __init__(self, root: Path, keep: int, in_background: bool) -> None:
        self.root, self.keep, self.in_background = root, keep, in_background
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.staging: dict[str, torch.Tensor] = {}  # kept: memory that is known costs a fraction
        # Collectives of the writing thread must not mix with those of training.
        self.group: Any = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def save(self, step: int, pieces: Mapping[str, Piece], about: Mapping[str, Any]) -> None:
        """Returns when the state is copied; `wait` when it is on disk."""
        self.wait()
        with span("checkpoint copy", step=step):
            staged = {
                name: piece._replace(tensor=self._copied(name, piece.tensor))
                for name, piece in pieces.items()
            }
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                torch.cuda.synchronize()
        text = msgspec.json.encode(about)
        if not self.in_background:
            self._write(step, staged, text)
            return
        self.thread = threading.Thread(
            target=self._write, args=(step, staged, text), name="checkpoint"
        )
        self.thread.start()

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def problem(self) -> NotSaved | None:
        """Why the last save failed, once."""
        failure, self.failure = self.failure, None
        if failure is None:
            return None
        full = isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if full else f"{type(failure).__name__}: {failure}"
        kept = "older checkpoints are still there; go on from them with the same --out"
        return NotSaved(
            f"a checkpoint in {self.root} was not written: {what}",
            hint=f"make room: {kept}" if full else kept,
        )

    def _write(self, step: int, staged: dict[str, Piece], about: bytes) -> None:
        folder = folders.folder_of(self.root, step)
        first = self.group is None or dist.get_rank() == 0
        try:
            with span("checkpoint write", step=step):
                if first:
                    folders.remove(folder)  # what an earlier life left unfinished
                    folder.mkdir(parents=True)
                    (folder / folders.ABOUT).write_bytes(about)
                self._barrier()
                write_pieces(folder, staged, self.group)
                if first:
                    folders.mark_complete(folder, step)
                    folders.set_aside(self.root, step)
                    folders.keep_newest(self.root, self.keep)
        except BaseException as error:  # noqa: BLE001  told by `problem`, on the training thread
            self.failure = _full(folder, staged) or _cause(error)
            if first:
                folders.remove(folder)

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Into memory of an earlier save: the one before has been written, so it is free again."""
        home = self.staging.get(name)
        if home is None or home.shape != tensor.shape or home.dtype != tensor.dtype:
            home = self.staging[name] = _like(tensor)
        return home.copy_(tensor.detach(), non_blocking=True)

    def _barrier(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)


def write_pieces(folder: Path, pieces: Mapping[str, Piece], group: Any = None) -> None:
    tensors = {name: piece.tensor for name, piece in pieces.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about its own deprecated parts
        dcp.save(
            tensors, storage_writer=dcp.FileSystemWriter(folder), planner=SavePieces(pieces),
            process_group=group, no_dist=group is None,
        )  # fmt: skip


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """On the host; pinned where a GPU copies into it, so that it runs at the speed of the bus."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _full(folder: Path, staged: Mapping[str, Piece]) -> OSError | None:
    """torch's writer hides a full disk behind an error of its own; what is free now tells."""
    size = sum(piece.tensor.nbytes for piece in staged.values())
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free < size:
            return OSError(errno.ENOSPC, "no space left", str(folder))
    return None


def _cause(error: BaseException) -> BaseException:
    """What torch has wrapped: the first error of the operating system in it."""
    failures = getattr(
        error, "failures", None
    )  # of a CheckpointException: rank -> (error, traceback)
    for failure, *_ in (failures or {}).values():
        if isinstance(failure, BaseException):
            return _cause(failure)
    return error
