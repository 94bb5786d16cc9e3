"""Agreement of all ranks on the checkpoint to resume from, of which each rank has read its part.

    rank 0  [100 200 300]  --.                                300: rank 1 finds a damaged part -> passed over by all
    rank 1  [100 200 300]  ---+-- the steps that all see -->  200: every part is good          -> chosen by all
    rank 2  [100 200]      --'    after a while, if the file system is slow to show them

Each rank verifies 1/world of a checkpoint's bytes, so it is read once, not once per rank. All ranks call this together.
"""

import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cairn.core.errors import DataError
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.folder import POLL_S, VISIBLE_S


def choose_newest(
    root: Path, group: Any, warn: list[str], visible_s: float = VISIBLE_S
) -> Path | None:
    """The newest checkpoint that every rank can use, the same on all; `warn` gets what was passed over.

    `group`: of all ranks; None for one process. An error where checkpoints exist and none can be used.
    """
    if group is None:
        return folders.newest(root, warn)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    steps_by_rank = _seen_by_all(root, group, visible_s)
    complete = [set(steps) for steps in steps_by_rank]
    common, any_complete = set.intersection(*complete), set.union(*complete)
    _warn_of_unfinished(root, any_complete, warn)
    for step in sorted(any_complete, reverse=True):
        folder = folders.folder_of(root, step)
        blind = [number for number, steps in enumerate(steps_by_rank) if step not in steps]
        if blind:
            warn.append(f"passed over {folder.name}: rank {blind[0]} does not see it")
            continue
        reasons = gathered(folders.complaint(folder, rank, world), group)
        reason = next((reason for reason in reasons if reason is not None), None)
        if reason is None:
            return folder
        warn.append(f"passed over {folder.name}: {reason}")
    if not any_complete:
        return None
    hint = (
        "restore them from a copy, or name another folder with --out to begin anew"
        if common
        else "--out has to be a folder that all ranks share"
    )
    raise DataError(
        f"none of the {len(any_complete)} checkpoints in {root} can be used: {'; '.join(warn)}",
        hint=hint,
    )


def gathered(mine: Any, group: Any) -> list[Any]:
    """Gather a value from every rank, in rank order."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


def _seen_by_all(root: Path, group: Any, visible_s: float) -> list[list[int]]:
    """The complete steps that each rank sees; asked again for a while as long as they differ."""
    deadline = time.monotonic() + visible_s
    while True:
        answers = gathered((folders.complete_steps(root), time.monotonic() > deadline), group)
        steps = [own for own, _ in answers]
        # Rank 0's clock decides for all, so that all leave in the same round.
        if all(own == steps[0] for own in steps) or answers[0][1]:
            return steps
        time.sleep(POLL_S)


def _warn_of_unfinished(root: Path, complete: set[int], warn: list[str]) -> None:
    for step in reversed(folders.steps(root)):
        if step not in complete and step > max(complete, default=-1):
            folder = folders.folder_of(root, step)
            warn.append(f"passed over {folder.name}: {folders.lacks(folder)}")
