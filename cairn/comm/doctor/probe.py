"""Measures every pair of ranks, and one piece of work on each: the doctor's own evidence.

One pair at a time, the others wait at a barrier, so pairs do not disturb each other. A message goes there
and a word comes back, several times; the same computation runs on every rank. Works in any process
group that can send and receive: forked ranks here, or torchrun over many hosts.
"""

import random
import socket
import time
from collections.abc import Callable
from typing import Any

from cairn.comm.doctor.findings import PairProbe, RankFacts
from cairn.comm.doctor.pairs import examine_probe, merged
from cairn.comm.doctor.ranks import NO_ANSWER, default_interface, run_ranks
from cairn.core.errors import CairnError

BYTES, TRIES = 1 << 16, 8
Delay = Callable[[int, int, random.Random], float]  # seconds that a message from rank to rank takes


class ProbeFailed(CairnError):
    exit_status = 1


def no_delay(source: int, target: int, dice: random.Random) -> float:
    return 0.0


def probe_here(
    world: int,
    *,
    size: int = BYTES,
    tries: int = TRIES,
    delay: Delay = no_delay,
    facts: list[RankFacts] | None = None,
    seed: int = 0,
    timeout_s: float = 120.0,
    **where: Any,
) -> PairProbe:
    """Ranks on this host. `delay` and `facts` (who they say they are) are for injected faults."""

    def work(rank: int, ranks: int) -> PairProbe | None:
        return measure(rank, ranks, size, tries, delay, facts[rank] if facts else None, seed)

    answers = run_ranks(world, work, timeout_s=timeout_s, **where)
    if not isinstance(answers[0], PairProbe):
        silent = [rank for rank, answer in enumerate(answers) if answer is NO_ANSWER]
        raise ProbeFailed(
            f"no answer from ranks {silent} within {timeout_s:.0f} s",
            hint="is the interface right? GLOO_SOCKET_IFNAME names it",
        )
    return answers[0]


def probe_surely(world: int, *, rounds: int = 4, seed: int = 0, **what: Any) -> PairProbe:
    """Probes again while something looks slow, and judges all tries together."""
    found = probe_here(world, seed=seed, **what)
    for again in range(1, rounds):
        if not examine_probe(found):
            break
        found = merged(found, probe_here(world, seed=seed + again, **what))
    return found


def measure_joined(size: int, tries: int) -> PairProbe | None:
    """Under a launcher such as torchrun: joins its ranks, measures, and leaves."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        return measure(dist.get_rank(), dist.get_world_size(), size, tries)
    finally:
        dist.destroy_process_group()


def measure(
    rank: int,
    world: int,
    size: int,
    tries: int,
    delay: Delay = no_delay,
    mine: RankFacts | None = None,
    seed: int = 0,
) -> PairProbe | None:
    """Called by all ranks of the default group; the probe on rank 0."""
    import torch.distributed as dist

    if mine is None:
        name, address = default_interface()
        mine = RankFacts(rank=rank, host=socket.gethostname(), interface=name, address=address)
    times = _pairs(rank, world, size, tries, delay, random.Random(seed * 1009 + rank))
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, (mine, times, _work()))
    if rank:
        return None
    table = [[list(gathered[a][1].get(b, [])) for b in range(world)] for a in range(world)]
    return PairProbe(
        bytes=size,
        facts=[row[0] for row in gathered],
        pair_us=table,
        compute_us=[row[2] for row in gathered],
    )


def _pairs(
    rank: int, world: int, size: int, tries: int, delay: Delay, dice: random.Random
) -> dict[int, list[float]]:
    import torch
    import torch.distributed as dist

    message, word = torch.zeros(size, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    found: dict[int, list[float]] = {}
    for source in range(world):
        for target in range(world):
            if source == target:
                continue
            dist.barrier()
            if rank == source:
                found[target] = []
                for _ in range(tries + 1):
                    began = time.perf_counter()
                    late = delay(source, target, dice)
                    if late:
                        time.sleep(late)
                    dist.send(message, target)
                    dist.recv(word, target)
                    found[target].append(1e6 * (time.perf_counter() - began))
                del found[target][0]  # the first one opens the connection
            elif rank == target:
                for _ in range(tries + 1):
                    dist.recv(message, source)
                    dist.send(word, source)
    return found


def _work() -> float:
    """A small loop, best of some, in microseconds."""
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        sum(number * number for number in range(2000))
        best = min(best, 1e6 * (time.perf_counter() - began))
    return best
