"""Reads a checkpoint into the state of a run, whatever layout has written it.

    about.json  -> is it of this model? how far was it?      refused with the fields that differ
    pieces      -> each rank reads the rectangles that it holds

The tensors that are there already are written into; nothing is loaded twice.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from cairn.core.errors import CairnError, ConfigError, DataError
from cairn.models.spec import ModelSpec
from cairn.train.checkpoint.folder import ABOUT
from cairn.train.checkpoint.piece import Piece
from cairn.train.trainable import Base


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a checkpoint."""

    version: int = 1
    step: int  # updates done
    samples: int  # consumed: the whole state of the data
    tokens: int = 0
    spec: ModelSpec
    data: str = ""  # fingerprint of the source
    watch: list[float] = []  # recent losses, of the bad-step policy
    config: dict[str, Any] = {}  # the recipe as it ran
    world: int = 1
    base: Base | None = None  # where frozen weights are; None: all of them are here
    source: list[dict[str, Any]] = []  # of a stateful source: its state on each data rank


def read_about(folder: Path) -> About:
    try:
        return msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(
            f"{folder} has no readable {ABOUT}: {error}", hint="is it a checkpoint of cairn train?"
        ) from None


def check_model(about: About, spec: ModelSpec, folder: Path) -> None:
    """Refuses a checkpoint of another architecture, with what differs."""
    differing = [
        f"{name} is {getattr(about.spec, name)!r} there and {getattr(spec, name)!r} here"
        for name in spec.__struct_fields__
        if getattr(about.spec, name) != getattr(spec, name)
    ]
    if differing:
        raise ConfigError(
            f"{folder} is a checkpoint of another model: {'; '.join(differing[:4])}",
            hint="name another folder with --out, or the model that it was written with",
        )


def load_pieces(folder: Path, pieces: Mapping[str, Piece], together: bool = True) -> None:
    """`together`: all ranks of the process group call this; otherwise one reads by itself."""
    import torch.distributed.checkpoint as dcp  # a second, which only those who load spend

    from cairn.train.checkpoint.planner import LoadPieces

    tensors = {name: piece.tensor for name, piece in pieces.items()}
    alone = not together or not dist.is_initialized()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(
                tensors,
                storage_reader=dcp.FileSystemReader(folder),
                planner=LoadPieces(pieces),
                no_dist=alone,
            )
    except CairnError:
        raise
    except dcp.api.CheckpointException as error:
        for failure, *_ in error.failures.values():
            if isinstance(failure, CairnError):
                raise failure from None
        raise
