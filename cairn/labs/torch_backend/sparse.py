"""All-reduce that does not send blocks of zeros, and the hook that gives it DDP's gradients.

    1  each rank tells all others which of its blocks are not zero: one bit for each block
    2  too many of them: a dense all-reduce, and no more questions for a while
    3  each block has an owner; blocks go to their owners, which add them up in the order of the ranks
    4  the owners send the sums to all

That is the schedule `all_reduce/sparse` (OmniReduce), with the blocks between two ranks as one message.
At density d on n ranks a rank sends d + 1 - (1-d)^n of the vector's blocks instead of two.

    model.register_comm_hook(SparseState(), sparse_hook)       # DDP over the backend "cairn"
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cairn.core.errors import ConfigError
from cairn.labs.torch_backend.collectives import Collectives

BLOCK = 256  # elements
MOST_SHARE = 0.6  # of the bytes of a dense one: beyond that packing costs more than it saves
ASK_EVERY = 16  # all-reduces of a bucket that was dense before it is looked at again


@dataclass
class SparseState:
    """State of the hook between steps, equal on every rank because its decisions are."""

    group: Any = None  # of backend "cairn"; None: the world
    block: int = BLOCK
    most_share: float = MOST_SHARE
    dense: int = 0  # buckets that went dense
    sparse: int = 0
    share: float = 1.0  # of the last bucket: its bytes as a share of a dense one's
    skip: dict[int, int] = field(default_factory=dict)  # by bucket, how often not to ask


def sparse_hook(state: SparseState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Communication hook for `DistributedDataParallel.register_comm_hook`: the mean over the ranks."""
    group = state.group or dist.group.WORLD
    if not hasattr(group, "sparse_all_reduce"):
        raise ConfigError(
            f"the sparse hook on a group of backend '{dist.get_backend(group)}'",
            hint='initialise the process group with backend "cairn"',
        )
    flat, index = bucket.buffer(), bucket.index()
    ask = state.skip.get(index, 0) == 0

    def decided(share: float | None) -> None:
        if share is None:
            state.skip[index] -= 1
            state.dense += 1
            return
        state.share = share
        if share > state.most_share:
            state.dense += 1
            state.skip[index] = ASK_EVERY - 1
        else:
            state.sparse += 1

    work = group.sparse_all_reduce(
        flat, state.block, state.most_share if ask else None, decided, average=True
    )
    return work.get_future().then(lambda future: future.value()[0])


def sparse_all_reduce(
    collectives: Collectives,
    flat: torch.Tensor,
    block: int,
    most_share: float | None,
    decided: Callable[[float | None], None],
    timeout_s: float,
) -> None:
    """Sums in place. `decided` is called with the share of bytes it takes; None when it is not needed."""
    blocks = flat.numel() // block
    if most_share is None or blocks < collectives.ranks:
        decided(None if most_share is None else 1.0)
        collectives.all_reduce(flat, "sum", timeout_s)
        return
    body = flat[: blocks * block].view(blocks, block)
    present = _maps(collectives, body, timeout_s)
    share = share_of_dense(present)
    decided(share)
    if share > most_share:
        collectives.all_reduce(flat, "sum", timeout_s)
        return
    _exchange(collectives, body, present, timeout_s)
    if flat.numel() > blocks * block:
        collectives.all_reduce(flat[blocks * block :], "sum", timeout_s)


def share_of_dense(present: np.ndarray) -> float:
    """Blocks of the busiest rank, sent or received, over those of a dense all-reduce."""
    ranks, blocks = present.shape
    if ranks == 1:  # neither sends anything
        return 1.0
    owner = np.arange(blocks) % ranks
    alive = present.any(axis=0)
    mine = owner == np.arange(ranks)[:, None]
    # By each owner, of the others.
    received = (present[None] & mine[:, None]).sum((1, 2)) - (present & mine).sum(1)
    first = np.maximum((present & ~mine).sum(1), received)
    second = (alive & mine).sum(1) * (ranks - 1)
    busiest = int((first + np.maximum(second, alive.sum() - (alive & mine).sum(1))).max())
    return busiest / (2 * (ranks - 1) / ranks * blocks)


def _maps(collectives: Collectives, body: torch.Tensor, timeout_s: float) -> np.ndarray:
    """[ranks, blocks] of booleans: who has anything in which block."""
    mine = body.count_nonzero(1).gt(0).numpy()
    packed = torch.from_numpy(np.packbits(mine))
    every = [torch.empty_like(packed) for _ in range(collectives.ranks)]
    collectives.all_gather(every, packed, timeout_s)
    rows = [np.unpackbits(row.numpy(), count=len(mine)) for row in every]
    return np.stack(rows).astype(bool)


def _exchange(
    collectives: Collectives, body: torch.Tensor, present: np.ndarray, timeout_s: float
) -> None:
    """Blocks to their owners, sums from the owners; only what is present."""
    ranks, me = collectives.ranks, collectives.rank
    owner = np.arange(present.shape[1]) % ranks
    to_owner = [np.flatnonzero(present[me] & (owner == peer)) for peer in range(ranks)]
    at_me = [np.flatnonzero(present[peer] & (owner == me)) for peer in range(ranks)]
    outgoing = [body[torch.from_numpy(which)].view(-1) for which in to_owner]
    come = [body.new_empty(len(which) * body.shape[1]) for which in at_me]
    collectives.all_to_all(come, outgoing, timeout_s)
    alive = present.any(axis=0)
    owned = [np.flatnonzero(alive & (owner == peer)) for peer in range(ranks)]
    sums = body.new_zeros(len(owned[me]), body.shape[1])
    for which, part in zip(at_me, come, strict=True):
        place = torch.from_numpy(np.searchsorted(owned[me], which))
        sums.index_add_(0, place, part.view(-1, body.shape[1]))
    every = [body.new_empty(len(which) * body.shape[1]) for which in owned]
    collectives.all_gather(every, sums.view(-1), timeout_s)
    for which, part in zip(owned, every, strict=True):
        body[torch.from_numpy(which)] = part.view(-1, body.shape[1])
