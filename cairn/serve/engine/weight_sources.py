"""Sources of new weights for a running engine; torch-free because they are sent between processes.

"runs/x/step-200"                        a checkpoint: a folder or a file that all ranks can read
SyncedWeights(["tcp://..", ..])          ranks of a trainer that publish them (`comm.transfer.weight_sync`)
"""

import msgspec


class SyncedWeights(msgspec.Struct, frozen=True, kw_only=True, tag="synced"):
    """Ranks that hold the rows of every tensor, as `models.weight_shards.held_by_rows` cuts them."""

    addresses: list[str]  # of all ranks, in their order
    transport: str = "tcp"
    timeout_s: float = 60.0


WeightsFrom = str | SyncedWeights


def identity_of(version: int, loaded_before: int = 0) -> bytes:
    """Prefix of every request's identity; empty for the initial weights of the engine.

    `loaded_before`: how often weights of this number were loaded, which may have been others.
    """
    if not version:
        return b""
    again = b" again %d" % loaded_before if loaded_before else b""
    return b"weights %d%b;" % (version, again)
