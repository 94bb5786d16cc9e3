"""Small all-reduces between the GPUs of a node, over torch's symmetric memory; NCCL for the rest.

    reduce = SymmetricAllReduce(group, device)        # once: memory that every rank can read and write
    y = reduce(x)                                     # within a CUDA graph, too

Tensor-parallel decoding reduces a few kilobytes, hundreds of times a step, and waits for NCCL's latency each time. Here
a rank copies its vector into shared memory, waits until all have (one barrier on the GPU), and adds up what it reads.
Two halves are used in turn, so nobody overwrites what another still reads: a rank that is two calls ahead has passed
the barrier of the call between, which the slowest enters only when it has read. Two-shot needs a second barrier.

Which way and why: `way`. Anything else (too large, another type, not contiguous, no symmetric memory on this machine)
goes to `torch.distributed.all_reduce` of the group.
"""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from cairn.comm.gpu.peer_sum import one_shot, two_shot

Way = Literal["one_shot", "two_shot", "library"]
TYPES = (torch.bfloat16, torch.float16, torch.float32)
ALIGNMENT = 64  # bytes: 16 elements of the widest type
MOST_BYTES = 2 << 20
ONE_SHOT_BYTES = 256 << 10  # n vectors read by every rank: for two ranks; fewer for more
HALVES = 2


def way(
    nbytes: int, dtype: torch.dtype, ranks: int, most_bytes: int = MOST_BYTES
) -> tuple[Way, str]:
    """How a vector of that size is reduced, and why."""
    if dtype not in TYPES:
        return "library", f"{dtype} is not summed here"
    if nbytes > most_bytes:
        return (
            "library",
            f"{nbytes} bytes are more than {most_bytes}: bandwidth counts, not latency",
        )
    limit = ONE_SHOT_BYTES // max(ranks - 1, 1)
    if nbytes <= limit:
        return "one_shot", f"up to {limit} bytes one wait is worth reading {ranks} vectors"
    return "two_shot", f"above {limit} bytes every rank adds up its part only"


class SymmetricAllReduce:
    """All ranks of the group make it together, with the same arguments, and call it in the same order."""

    def __init__(self, group: Any, device: torch.device, most_bytes: int = MOST_BYTES) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        self.group, self.device = group, device
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.most_bytes = -(-most_bytes // ALIGNMENT) * ALIGNMENT
        self._turn = 0
        # | vector of even calls | vector of odd calls | result of even calls | result of odd calls |
        self._memory = symmetric_memory.empty(
            2 * HALVES * self.most_bytes, dtype=torch.uint8, device=device
        )
        self._handle = symmetric_memory.rendezvous(self._memory, group)
        every = self._handle.buffer_ptrs
        ahead = self._memory.data_ptr() - every[self.rank]  # the same place in everybody's memory
        self._addresses = torch.tensor(
            [one + ahead for one in every], dtype=torch.int64, device=device
        )

    def __call__(self, x: Tensor, force: Way | None = None) -> Tensor:
        """The sum over the ranks: a new tensor, or `x` itself where the library did it."""
        chosen = force or way(x.nbytes, x.dtype, self.ranks, self.most_bytes)[0]
        if chosen == "library" or not x.is_contiguous():
            dist.all_reduce(x, group=self.group)
            return x
        half = self._turn % HALVES
        self._turn += 1
        begin = half * self.most_bytes
        self._view(begin, x).copy_(x)
        self._handle.barrier(channel=0)
        offset = begin // x.element_size()
        if chosen == "one_shot":
            out = torch.empty_like(x)
            one_shot(self._addresses, out, offset)
            return out
        result = begin + HALVES * self.most_bytes
        two_shot(self._addresses, x, self.rank, offset, result // x.element_size())
        self._handle.barrier(channel=1)
        return self._view(result, x).clone()

    def _view(self, begin: int, like: Tensor) -> Tensor:
        return self._memory[begin : begin + like.nbytes].view(like.dtype).view(like.shape)
