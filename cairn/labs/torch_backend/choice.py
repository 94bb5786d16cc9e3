"""Choice of a schedule by message size, from the alpha and beta of shared memory and of the network.

    time =  messages * alpha  +  bytes through memory / beta       of the busiest rank
          + waits * alpha'    +  bytes on the wire / beta'         of the busiest host

The loads are counted on the schedule itself, so any of the catalogue can compete, two-level ones too.
Every rank chooses for itself and must come to the same choice: only the size, the hosts and the
settings go in. The constants of shared memory are a fit of `benchmarks/comm_backend.py`; those of the
network come from the options. Pure.
"""

import functools
from collections import Counter
from typing import NamedTuple

import numpy as np

from cairn.comm.cost import Estimate, LinkCost
from cairn.comm.schedule.ops import Collective, OpKind
from cairn.labs.torch_backend.program import ORDERED, schedule_named

SHARED = LinkCost(alpha_us=50.0, gb_per_s=5.0)  # of a message; of a touch: copy in, copy out or add
CANDIDATES: dict[Collective, tuple[str, ...]] = {
    "all_reduce": ("one_shot", "two_shot", "ring", "halving_doubling", "two_level"),
    "all_gather": ("direct", "ring", "bruck", "two_level"),
    "reduce_scatter": ("direct", "ring", "bruck", "two_level"),
    "all_to_all": ("pairwise",),
    "broadcast": ("binomial", "chain"),
    "reduce": ("binomial", "chain"),
}
IN_RANK_ORDER: dict[Collective, str] = {"all_reduce": ORDERED, "reduce_scatter": ORDERED}
NEAR = 0.03  # of the fastest: such a difference is none, and the first of the table is taken
CROWDING = 0.06  # of the bandwidth is lost for each further flow into one host at a time
ONE_SHOT_MOST = 32 << 10  # bytes up to which a deterministic all-reduce goes in one shot
CHUNK_BYTES = 256 << 10  # of a pipeline
MOST_CHUNKS = 64
PARTS, PARTS_LEAST = 2, 256 << 10  # between hosts: so many, from so many bytes on


class Places(NamedTuple):
    """The hosts of the ranks in the order of the schedule, as numbers from 0."""

    hosts: tuple[int, ...]

    @property
    def ranks(self) -> int:
        return len(self.hosts)

    @property
    def gpus(self) -> int | None:
        """Ranks of each host, when all have the same number and there are several of both."""
        counts = set(Counter(self.hosts).values())
        several = len(set(self.hosts)) > 1 and len(counts) == 1
        return counts.pop() if several and max(counts) > 1 else None


class Load(NamedTuple):
    messages: int  # of the busiest rank
    touched: float  # vectors through its memory
    waits: int  # steps that cross hosts
    wire: float  # vectors through the busiest host's network, in its busier direction
    fan_in: int = 1  # ranks that send to one host in one step


class Chosen(NamedTuple):
    name: str
    gpus: int | None
    chunks: int
    parts: int = 1  # of the vector, one behind the other


def choose(
    collective: Collective,
    places: Places,
    size: int,
    network: LinkCost,
    deterministic: bool = False,
    forced: str = "",
) -> Chosen:
    """The fastest by the model; `forced` where the collective has it, rank order where asked."""
    chunks = min(max(size // CHUNK_BYTES, 1), MOST_CHUNKS)
    if deterministic and collective in IN_RANK_ORDER:
        small = collective == "all_reduce" and size <= ONE_SHOT_MOST
        return Chosen("one_shot" if small else IN_RANK_ORDER[collective], None, 1)
    named = forced if forced in CANDIDATES[collective] else ""
    if named == "two_level" and places.gpus is None:
        named = ""
    rows = {row.name: row.us for row in ranked(collective, places, size, network)}
    near = (1 + NEAR) * min(rows.values())
    name = named or next(one for one in CANDIDATES[collective] if rows.get(one, near + 1) <= near)
    between = collective == "all_reduce" and len(set(places.hosts)) > 1 and name != "one_shot"
    return Chosen(name, places.gpus, chunks, PARTS if between and size >= PARTS_LEAST else 1)


def ranked(collective: Collective, places: Places, size: int, network: LinkCost) -> list[Estimate]:
    """Every candidate, fastest first; equals keep the order of the table."""
    rows = []
    chunks = min(max(size // CHUNK_BYTES, 1), MOST_CHUNKS)
    for name in CANDIDATES[collective]:
        if name == "two_level" and places.gpus is None:
            continue
        load = load_of(collective, name, places, chunks)
        us = load.messages * SHARED.alpha_us + load.waits * network.alpha_us
        us += load.touched * size / (1e3 * SHARED.gb_per_s)
        crowd = 1 + CROWDING * max(load.fan_in - 1, 0)
        us += crowd * load.wire * size / (1e3 * network.gb_per_s)
        steps = load.messages + load.waits
        rows.append(Estimate(name=name, us=us, steps=steps, traffic=load.touched + load.wire))
    return sorted(rows, key=lambda row: row.us)


@functools.lru_cache(maxsize=512)
def load_of(collective: Collective, name: str, places: Places, chunks: int) -> Load:
    schedule = schedule_named(collective, name, places.ranks, 0, places.gpus, chunks)
    ops, ranks = schedule.ops, places.ranks
    # A receive that reduces reads two and writes one; a copy reads one and writes one.
    weight = np.where(ops.kind == int(OpKind.RECV_REDUCE), 1.5, 1.0)
    touched = np.bincount(ops.rank, weights=weight, minlength=ranks) / schedule.chunks
    away = ops.peer >= 0
    message = np.unique(np.stack([ops.rank[away], ops.peer[away], ops.step[away]]), axis=1)
    messages = np.bincount(message[0], minlength=ranks) if message.size else np.zeros(1, np.int64)
    sends = ops.kind == int(OpKind.SEND)
    host = np.array(places.hosts)
    source, target = host[ops.rank[sends]], host[ops.peer[sends]]
    crossing = source != target
    out = np.bincount(source[crossing], minlength=ranks)
    into = np.bincount(target[crossing], minlength=ranks)
    flows = np.stack([ops.step[sends][crossing], target[crossing], ops.rank[sends][crossing]])
    _, fan_in = np.unique(np.unique(flows, axis=1)[:2], axis=1, return_counts=True)
    return Load(
        fan_in=int(fan_in.max(initial=0)),
        messages=int(messages.max()),
        touched=float(touched.max(initial=0)),
        waits=len(np.unique(ops.step[sends][crossing])),
        wire=float(np.maximum(out, into).max(initial=0)) / schedule.chunks,
    )
