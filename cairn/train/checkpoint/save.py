"""Writes the state of a run beside the training: a quick copy first, the disk after.

    state --copy to the host--> staged --thread--> files --all ranks agree--> COMPLETE --> older ones removed
                 `-- training goes on here

What several ranks hold is staged and written by one of them, so dp replicas need the host's memory for one state.
One save at a time: the next one waits for the one before. Every part of a save ends with all ranks exchanging whether
it worked, so a write that fails on one rank (disk full) fails the save on all of them: nothing is left behind, the
older checkpoints stay, `problem` reports it once, and the run goes on. Knows nothing about what the state means.
"""

import errno
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from cairn.core.errors import CairnError
from cairn.core.events import span
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.choose import gathered
from cairn.train.checkpoint.piece import Piece

Result = TypeVar("Result")
Key = tuple[str, tuple[int, ...]]  # a piece, by its name and offsets
STORAGE_TIMEOUT = timedelta(hours=6)  # a slow disk is no hang; a rank that dies is noticed at once


class NotSaved(CairnError):
    """A checkpoint is not on disk. Nothing is wrong with what was asked: with room, it would be."""

    exit_status = 1


class Saver:
    """Used by all ranks alike; rank 0 writes what is not a tensor."""

    def __init__(self, root: Path, keep: int, in_background: bool) -> None:
        self.root, self.keep, self.in_background = root, keep, in_background
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.completed = 0  # saves of this life
        self.staging: dict[str, torch.Tensor] = {}  # kept: memory that is known costs a fraction
        self.held: list[tuple[Key, int]] = []  # what this rank holds, with bytes
        self.owned: set[str] = set()  # of that, what it writes
        # Collectives of the writing thread must not mix with those of training.
        self.group: Any = (
            dist.new_group(backend="gloo", timeout=STORAGE_TIMEOUT)
            if dist.is_initialized()
            else None
        )
        self.rank = 0 if self.group is None else dist.get_rank()

    def save(self, step: int, pieces: Mapping[str, Piece], about: Mapping[str, Any]) -> None:
        """Returns when the state is copied; `wait` when it is on disk."""
        self.wait()
        with span("checkpoint copy", step=step):
            staged = {
                name: piece._replace(tensor=self._copied(name, piece.tensor))
                for name, piece in self._own(pieces).items()
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
        kept = "no checkpoint is there yet to go on from"
        if folders.complete_steps(self.root):
            kept = "older checkpoints are still there; go on from them with the same --out"
        return NotSaved(
            f"a checkpoint in {self.root} was not written: {what}",
            hint=f"make room: {kept}" if full else kept,
        )

    def _write(self, step: int, staged: dict[str, Piece], about: bytes) -> None:
        folder = folders.folder_of(self.root, step)
        try:
            with span("checkpoint write", step=step):
                self._agreed(lambda: self._begin(folder, about))
                self._agreed(lambda: write_pieces(folder, staged, self.group))
                parts = self._agreed(lambda: folders.files_of(folder, self.rank))
                files = {name: file for part in parts for name, file in part.items()}
                self._agreed(lambda: self._commit(folder, step, files))
            self.completed += 1
        except BaseException as error:  # noqa: BLE001  `problem` reports it on the training thread
            self.failure = error
            # One that is complete may be the only one by now, though another rank died in the last exchange.
            if self.rank == 0 and not (folder / folders.COMPLETE).exists():
                folders.remove(folder)

    def _begin(self, folder: Path, about: bytes) -> None:
        if self.rank == 0:
            folders.remove(folder)  # what an earlier life left unfinished
            folder.mkdir(parents=True)
            folders.write_synced(folder / folders.ABOUT, about)

    def _commit(self, folder: Path, step: int, files: dict[str, folders.File]) -> None:
        if self.rank == 0:
            folders.mark_complete(folder, step, files)
            folders.set_aside(self.root, step)
            folders.keep_newest(self.root, self.keep)

    def _agreed(self, work: Callable[[], Result]) -> list[Result]:
        """The results of all ranks; an error on all ranks if the work has failed on one of them."""
        if self.group is None:
            return [work()]
        failure: Exception | None = None
        result: Result | None = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  raised below, once the other ranks know of it
            failure = error
        ends = gathered((_portable(failure), result), self.group)
        if failure is not None:
            raise failure
        for rank, (other, _) in enumerate(ends):
            if other is not None:
                number, words = other
                words = f"on rank {rank}: {words}"
                raise RuntimeError(words) if number is None else OSError(number, words)
        return [result for _, result in ends]

    def _own(self, pieces: Mapping[str, Piece]) -> Mapping[str, Piece]:
        """The pieces that this rank writes. Ranks ask each other again only if one of them holds other pieces now."""
        if self.group is None:
            return pieces
        held = [
            ((name, piece.offsets), piece.tensor.nbytes)
            for name, piece in pieces.items()
            if piece.tensor.numel()
        ]
        if any(gathered(held != self.held, self.group)):
            owner = owners(gathered(held, self.group))
            self.held = held
            self.owned = {key[0] for key, _ in held if owner[key] == self.rank}
            self.staging.clear()
        return {name: piece for name, piece in pieces.items() if name in self.owned}

    def _copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Into memory of an earlier save: the one before has been written, so it is free again."""
        home = self.staging.get(name)
        if home is None or home.shape != tensor.shape or home.dtype != tensor.dtype:
            home = self.staging[name] = _like(tensor)
        return home.copy_(tensor.detach(), non_blocking=True)


def owners(held: Sequence[Sequence[tuple[Key, int]]]) -> dict[Key, int]:
    """The rank that writes each piece; `held` has the pieces and their bytes by rank.

    Each goes to the holder with the fewest bytes so far, those that one rank alone holds first, then the large ones.
    """
    holders: dict[Key, list[int]] = {}
    sizes: dict[Key, int] = {}
    for rank, pieces in enumerate(held):
        for key, size in pieces:
            holders.setdefault(key, []).append(rank)
            sizes[key] = size
    bytes_of = [0] * len(held)
    owner: dict[Key, int] = {}
    for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key])):
        owner[key] = min(holders[key], key=bytes_of.__getitem__)
        bytes_of[owner[key]] += sizes[key]
    return owner


def write_pieces(folder: Path, pieces: Mapping[str, Piece], group: Any = None) -> None:
    import torch.distributed.checkpoint as dcp  # a second, which only those who save spend

    from cairn.train.checkpoint.planner import SavePieces, ShardWriter

    tensors = {name: piece.tensor for name, piece in pieces.items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about its own deprecated parts
            dcp.save(
                tensors,
                storage_writer=ShardWriter(folder),
                planner=SavePieces(pieces),
                process_group=group,
                no_dist=group is None,
            )
    except dcp.api.CheckpointException as error:
        raise _cause(error) from None


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Host buffer for a tensor, pinned for GPU copies at full bus speed."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _portable(failure: Exception | None) -> tuple[int | None, str] | None:
    """An error as numbers and text: its own type may not survive the way to another process."""
    if failure is None:
        return None
    return getattr(failure, "errno", None), f"{type(failure).__name__}: {failure}"


def _cause(error: Any) -> BaseException:
    """The error that torch wraps: the first OSError of all ranks, else the first error."""
    causes = [failure for failure, *_ in error.failures.values()]
    return next((cause for cause in causes if isinstance(cause, OSError)), causes[0])
