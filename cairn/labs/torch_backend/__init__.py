"""A torch.distributed backend in Python that executes collective schedules over shared memory and TCP.

    import cairn.labs.torch_backend
    torch.distributed.init_process_group("cairn", ...)

    group --> work --> collectives --> choice (which schedule)  --> executor --> shared_link | tcp_link
    torch's   inline   views over      program (one rank's part)    send, recv,  same host     other host
    API       or queue slots                                        reduce
    rendezvous: addresses of ranks     hang_detector: reasons for stopping     flight_recorder: recent operations
    point_to_point: send and recv

DDP, FSDP2, DTensor, functional collectives and the trainer's parallel layouts run over it unmodified, which its tests
prove. It exists for learning and for measurements: `cairn train` and `cairn serve` communicate over NCCL and gloo.
Importing this module registers the backend.
"""

import torch.distributed as dist

from cairn.labs.torch_backend.errors import (
    CommError,
    CommTimeout,
    GroupStopped,
    RankLost,
    RankMismatch,
)
from cairn.labs.torch_backend.group import CairnGroup
from cairn.labs.torch_backend.init_method import SCHEME, rendezvous
from cairn.labs.torch_backend.options import Options, checked, from_environment
from cairn.labs.torch_backend.sparse import SparseState, sparse_hook

__all__ = [
    "CairnGroup", "CommError", "CommTimeout", "GroupStopped", "Options", "RankLost",
    "RankMismatch", "SparseState", "register", "sparse_hook",
]  # fmt: skip
NAME = "cairn"


def register() -> None:
    """Register "cairn" as a backend of torch.distributed and `cairn://` as an init method."""
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
