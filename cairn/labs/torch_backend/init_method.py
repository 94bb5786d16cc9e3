"""Init method with a deadline for every wait: `init_process_group("cairn", init_method="cairn://")`.

    cairn://                 MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, as torchrun sets them
    cairn://HOST:PORT        rank= and world_size= are given to init_process_group

torch's own `env://` hangs for minutes where something else listens on the port, and does not say who is missing. Here a
port that is taken, a store that does not answer and a rank that never comes are errors on every rank, within the
timeout of the group, that name the rank and the reason. What torch's store does is the same.
"""

import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

import torch.distributed as dist

from cairn.labs.torch_backend.errors import CommError, CommTimeout

SCHEME = "cairn"
DEFAULT = timedelta(minutes=30)  # torch's own, for a group without a timeout


def rendezvous(
    url: str, timeout: timedelta = DEFAULT, **_: object
) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield the store, this rank and the world size; torch calls this for `cairn://` URLs."""
    parts = urlparse(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    rank = _number("rank", query.get("rank") or os.environ.get("RANK"), "RANK")
    world = _number(
        "world size", query.get("world_size") or os.environ.get("WORLD_SIZE"), "WORLD_SIZE"
    )
    host = parts.hostname or os.environ.get("MASTER_ADDR")
    port = parts.port or _number("port", os.environ.get("MASTER_PORT"), "MASTER_PORT")
    if not host:
        raise CommError(
            "init: the address of rank 0 is unknown", hint="set MASTER_ADDR, or cairn://HOST:PORT"
        )
    if not 0 <= rank < world:
        raise CommError(f"init: rank {rank} of a world of {world}", hint="ranks begin with 0")
    yield open_store(host, port, rank, world, timeout), rank, world
    raise CommError("init: a group cannot meet a second time", hint="start its ranks again")


def open_store(host: str, port: int, rank: int, world: int, timeout: timedelta) -> dist.TCPStore:
    """Rank 0 listens, unless torchrun does; the others connect."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not agent
    found: list[Any] = []

    def make() -> None:
        try:
            found.append(
                dist.TCPStore(
                    host, port, world, serves, timeout, wait_for_workers=False, multi_tenant=True
                )
            )
        except Exception as error:  # noqa: BLE001  raised below, by the waiting thread
            found.append(error)

    thread = threading.Thread(target=make, name="cairn-store", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds())
    if not found:
        raise CommTimeout(
            f"init: rank {rank} had no answer from {host}:{port} within {timeout.total_seconds():g} s",
            hint="rank 0 is not there, or something else listens on its port: try another MASTER_PORT",
        )
    if isinstance(found[0], Exception):
        said = str(found[0]).partition("\n")[0]
        raise CommError(
            f"init: rank {rank} {'cannot listen on' if serves else 'cannot reach'} {host}:{port}: {said}",
            hint="another MASTER_PORT" if serves else "does rank 0 run, and is that its address?",
        ) from None
    return found[0]


def _number(what: str, text: str | None, variable: str) -> int:
    try:
        return int(text or "")
    except ValueError:
        raise CommError(
            f"init: {text!r} is no {what}", hint=f"set {variable}, or start the ranks with torchrun"
        ) from None
