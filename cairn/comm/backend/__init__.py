"""A torch.distributed backend in Python that executes schedules, over shared memory and TCP.

    import cairn.comm.backend
    torch.distributed.init_process_group("cairn", ...)

    group --> work --> collectives --> choice (which schedule)  --> executor --> shared_link | tcp_link
    torch's   now or   views over      program (one rank's part)    send, recv,  same host     other host
    words     later    slots                                        reduce
    rendezvous: who is where     hang_detector: why a wait will never end     flight_recorder: what it did last
    messages, direct: sends between two ranks

DDP, FSDP2, DTensor, functional collectives and the trainer's parallel layouts run over it unmodified, which its tests
prove. It is here to learn from and to measure with: no product path uses it, `cairn train` and `cairn serve`
communicate over NCCL and gloo. Importing this module registers it.
"""

import torch.distributed as dist

from cairn.comm.backend.errors import (
    CommError,
    CommTimeout,
    GroupStopped,
    RankLost,
    RankMismatch,
)
from cairn.comm.backend.group import CairnGroup
from cairn.comm.backend.init_method import SCHEME, rendezvous
from cairn.comm.backend.options import Options, checked, from_environment
from cairn.comm.backend.sparse import SparseState, sparse_hook

__all__ = [
    "CairnGroup", "CommError", "CommTimeout", "GroupStopped", "Options", "RankLost",
    "RankMismatch", "SparseState", "register", "sparse_hook",
]  # fmt: skip
NAME = "cairn"


def register() -> None:
    """Makes "cairn" a backend of torch.distributed, and `cairn://` a way to meet; importing does it."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
        dist.register_rendezvous_handler(SCHEME, rendezvous)


def _create(
    given: "dist.distributed_c10d._DistributedBackendOptions", options: object
) -> CairnGroup:
    names = list(given.global_ranks_in_group) or list(range(given.group_size))
    settings = checked(options) if isinstance(options, Options) else from_environment()
    return CairnGroup(
        given.store, given.group_rank, given.group_size, names, given.timeout, settings
    )


register()
