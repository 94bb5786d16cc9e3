"""Injects faults into real ranks: one sleeps, one stays away, one calls another collective.

Every function leaves files as a user would have them: flight-recorder dumps of torch and of our backend, or a
probe. The hosts of a slow network are namespaces with limited rates where this machine permits them; elsewhere
the sender is held back by as much time.
"""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from cairn.comm.doctor import namespaces
from cairn.comm.doctor.findings import RankFacts
from cairn.comm.doctor.probe import Delay, no_delay, probe_surely
from cairn.comm.doctor.ranks import JOIN_S, NO_ANSWER, flight_recording, run_ranks

WORLD, ROUNDS = 4, 10
FAULT_ROUND = 5  # from which on a rank stays away, counted from 0
PATIENCE_S = 2.5  # of a rank that waits from that round on, before it writes its dump
LATE_S = 0.12  # a straggler, in each round
SLOW_S, LOST_S, LOST_SHARE = 0.015, 0.2, 0.4


def healthy(folder: Path, seed: int = 0) -> None:
    """Ranks over gloo, and over our backend, in turn."""
    dumps(folder, lambda rank, number: None, backend=("gloo", "cairn")[seed % 2])
    probe(folder, no_delay, seed)


def straggler(folder: Path, which: int = 2) -> None:
    dumps(folder, lambda rank, number: time.sleep(LATE_S) if rank == which else None)


def missing(folder: Path, which: int = 1, backend: str = "gloo") -> None:
    """Fault: one rank never enters the sixth collective."""
    dumps(folder, lambda rank, number: rank == which and number == FAULT_ROUND, backend=backend)


def dead(folder: Path, which: int = 3) -> None:
    """Fault: one rank has died and leaves no dump."""
    dumps(folder, lambda rank, number: rank == which and number == FAULT_ROUND, silent=which)


def other_size(folder: Path, which: int = 2, backend: str = "gloo") -> None:
    dumps(
        folder,
        lambda rank, number: None,
        backend=backend,
        last=lambda rank: ("all_reduce", 7 if rank == which else 5),
    )


def other_operation(folder: Path, which: int = 1) -> None:
    dumps(
        folder,
        lambda rank, number: None,
        last=lambda rank: ("broadcast" if rank == which else "all_reduce", 5),
    )


def slow_host(folder: Path, which: int = 2) -> str:
    """Fault: the network of one host is slow. Returns how it was made slow."""
    why = namespaces.reason()
    if why is not None:
        probe(folder, lambda a, b, dice: 4 * SLOW_S if which in (a, b) else 0.0)
        return f"senders held back: {why}"
    rates = ["400mbit"] * WORLD
    rates[which] = "8mbit"  # 60 ms for a message, so that a loaded machine does not hide it
    with namespaces.hosts(rates) as names:
        probe(
            folder,
            no_delay,
            tries=4,
            rounds=2,
            interfaces=["eth0"] * WORLD,
            enter=lambda rank: namespaces.enter(names[rank]),
        )
    return "network namespaces"


def slow_link(folder: Path) -> None:
    probe(folder, lambda a, b, dice: SLOW_S if {a, b} == {1, 3} else 0.0)


def lossy_link(folder: Path) -> None:
    def lost(a: int, b: int, dice: random.Random) -> float:
        return LOST_S if {a, b} == {0, 1} and dice.random() < LOST_SHARE else 0.0

    probe(folder, lost)


def bad_map(folder: Path) -> None:
    """Ranks 0 and 2 on one host, 1 and 3 on the other."""
    probe(
        folder,
        lambda a, b, dice: SLOW_S if a % 2 != b % 2 else 0.0,
        facts=_facts(["host0", "host1", "host0", "host1"]),
    )


def wrong_interface(folder: Path) -> None:
    facts = _facts()
    lost = msgspec.structs.replace(facts[1], interface="lo", address="127.0.0.1")
    probe(folder, no_delay, facts=[facts[0], lost, *facts[2:]])


def probe(folder: Path, delay: Delay, seed: int = 0, **where: Any) -> None:
    where.setdefault("facts", _facts())
    found = probe_surely(WORLD, delay=delay, seed=seed, **where)
    (folder / "probe.json").write_bytes(msgspec.json.encode(found))


def _facts(hosts: list[str] | None = None) -> list[RankFacts]:
    """Ranks of one machine that say they are on several."""
    hosts = hosts or [f"host{rank}" for rank in range(WORLD)]
    return [
        RankFacts(rank=rank, host=host, interface="eth0", address=f"10.77.0.{rank + 1}")
        for rank, host in enumerate(hosts)
    ]


def dumps(
    folder: Path,
    before: Callable[[int, int], Any],
    last: Callable[[int], tuple[str, int]] | None = None,
    silent: int | None = None,
    backend: str = "gloo",
) -> None:
    """All-reduces; `before` may sleep, or return True to stay away from then on."""

    def work(rank: int, world: int) -> bytes | None:
        import torch
        import torch.distributed as dist

        for number in range(ROUNDS):
            if before(rank, number) is True:
                if rank == silent:
                    return None
                time.sleep(2 * PATIENCE_S)  # alive, and busy with something else
                break
            waiting = dist.all_reduce(torch.ones(100), async_op=True)
            # Before, nothing hangs: a machine that does something else may be slow to connect its ranks.
            if not _within(waiting, PATIENCE_S if number >= FAULT_ROUND else JOIN_S):
                break
        if last is not None:
            op, count = last(rank)
            call = {"all_reduce": dist.all_reduce, "broadcast": _broadcast}[op]
            call(torch.ones(count), async_op=True)
            time.sleep(0.3)
        return flight_recording(backend)

    for rank, dump in enumerate(run_ranks(WORLD, work, backend=backend)):
        if dump is not NO_ANSWER and dump is not None:
            (folder / f"fr_rank_{rank}").write_bytes(dump)


def _broadcast(tensor: Any, async_op: bool) -> Any:
    import torch.distributed as dist

    return dist.broadcast(tensor, 0, async_op=async_op)


def _within(work: Any, seconds: float) -> bool:
    """Poll whether the work completes in time; a timeout of gloo would end the process group."""
    deadline = time.monotonic() + seconds
    while not work.is_completed():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
