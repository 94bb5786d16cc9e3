"""A transport by its name, and why one cannot be used here."""

import os
from functools import partial

from cairn.comm.transfer import nixl
from cairn.comm.transfer.endpoint import TransferEndpoint
from cairn.comm.transfer.mover import PATIENCE, Patience
from cairn.comm.transfer.shm import shm
from cairn.comm.transfer.tcp import tcp
from cairn.core.errors import UsageError, did_you_mean
from cairn.core.shared_secret import secret_from

TRANSPORTS = ("tcp", "shm", "nixl")


def make_transport(
    kind: str, name: str, patience: Patience = PATIENCE, host: str = "127.0.0.1"
) -> TransferEndpoint:
    """Create a transport. If the environment has a job secret (CAIRN_JOB_SECRET), both ends must know it.

    `host`: the address to listen on; shared memory has none.
    """
    secret = secret_from(os.environ)
    makers = {
        "tcp": partial(tcp, host=host, secret=secret),
        "shm": shm,
        "nixl": partial(nixl.nixl, host=host, secret=secret),
    }
    if kind not in makers:
        hint = did_you_mean(kind, makers, otherwise=f"there are: {', '.join(makers)}")
        raise UsageError(f"no transport {kind!r}", hint=hint)
    return makers[kind](name, patience=patience)


def unusable(kind: str) -> str | None:
    """Why this transport cannot be used on this machine, or None."""
    return nixl.why_not() if kind == "nixl" else None
