"""The dependencies of operations: which others have to be done before one can begin.

    partner    a receive needs its send: the k-th of the connection meets the k-th
    room       a send needs a place: the k-th send waits for receive k - capacity
    after      what the schedule says about other channels of the same rank
    (and the operation before it in its thread)

All four are known before anything runs, so a schedule is a graph: it can hang under a given
capacity exactly if that graph has a cycle, and its result is the same in every order of execution.
`JoinedOps` lays several schedules side by side, so that one pass of numpy proves them all.
"""

from typing import NamedTuple

import numpy as np

from cairn.comm.schedule.ops import CollectiveSchedule, OpColumns, OpKind

NONE = -1  # as an index it means the last element, which is always done


class JoinedOps(NamedTuple):
    """Schedules side by side; ranks, slots and operations are numbered through."""

    kind: np.ndarray
    rank: np.ndarray
    channel: np.ndarray
    peer: np.ndarray  # NONE where there is none
    step: np.ndarray
    slot: np.ndarray  # place in one array of all slots of all ranks
    source: np.ndarray
    after: np.ndarray
    first_op: np.ndarray  # of each schedule, and the end
    first_rank: np.ndarray
    first_slot: np.ndarray
    thread_begin: np.ndarray
    thread_end: np.ndarray
    thread: np.ndarray  # of each operation


def join(schedules: list[CollectiveSchedule]) -> JoinedOps:
    first_op = _offsets([schedule.operations for schedule in schedules])
    first_rank = _offsets([schedule.nodes for schedule in schedules])
    first_slot = _offsets([schedule.nodes * schedule.slots for schedule in schedules])

    def joined(field: str, shift: np.ndarray | None = None) -> np.ndarray:
        columns = [getattr(schedule.ops, field) for schedule in schedules]
        if shift is not None:
            columns = [np.where(c < 0, NONE, c + s) for c, s in zip(columns, shift, strict=False)]
        return np.concatenate(columns).astype(np.int64)

    def placed(field: str) -> np.ndarray:
        parts = []
        for schedule, begin in zip(schedules, first_slot, strict=False):
            slot = getattr(schedule.ops, field)
            parts.append(
                np.where(slot < 0, NONE, begin + schedule.ops.rank * schedule.slots + slot)
            )
        return np.concatenate(parts).astype(np.int64)

    rank, channel = joined("rank", first_rank), joined("channel")
    new = np.ones(len(rank), dtype=bool)
    new[1:] = (rank[1:] != rank[:-1]) | (channel[1:] != channel[:-1])
    begin = np.flatnonzero(new)
    return JoinedOps(
        kind=joined("kind"),
        rank=rank,
        channel=channel,
        peer=joined("peer", first_rank),
        step=joined("step"),
        slot=placed("slot"),
        source=placed("source"),
        after=joined("after", first_op),
        first_op=first_op,
        first_rank=first_rank,
        first_slot=first_slot,
        thread_begin=begin,
        thread_end=np.append(begin[1:], len(rank)),
        thread=np.cumsum(new) - 1,
    )


def pair(ops: JoinedOps) -> tuple[np.ndarray, np.ndarray]:
    """The other half of every send and receive (NONE: it has none), and its place in the line."""
    sends = np.flatnonzero(ops.kind == int(OpKind.SEND))
    receives = np.flatnonzero(
        (ops.kind == int(OpKind.RECV)) | (ops.kind == int(OpKind.RECV_REDUCE))
    )
    ranks, channels = int(ops.first_rank[-1]), int(ops.channel.max(initial=0)) + 1
    line = (ops.rank[sends] * ranks + ops.peer[sends]) * channels + ops.channel[sends]
    received = (ops.peer[receives] * ranks + ops.rank[receives]) * channels + ops.channel[receives]
    place, other = np.zeros(len(ops.kind), dtype=np.int64), np.full(len(ops.kind), NONE)
    longest = len(ops.kind) + 1
    send_key, receive_key = [], []
    for which, lines, keys in ((sends, line, send_key), (receives, received, receive_key)):
        place[which] = _place_in_group(lines)
        keys.append(lines * longest + place[which])
    order = np.argsort(send_key[0])
    sorted_send_keys = send_key[0][order]
    at = np.searchsorted(sorted_send_keys, receive_key[0])
    matched = at < len(sorted_send_keys)
    matched[matched] = sorted_send_keys[at[matched]] == receive_key[0][matched]
    matched_sends = sends[order[at[matched]]]
    other[receives[matched]] = matched_sends
    other[matched_sends] = receives[matched]
    return other, place


def room(ops: JoinedOps, other: np.ndarray, place: np.ndarray, capacity: int) -> np.ndarray:
    """The receive that frees capacity for each send; NONE while the connection has free capacity."""
    freed = np.full(len(ops.kind), NONE)
    sends = np.flatnonzero(ops.kind == int(OpKind.SEND))
    if not len(sends):
        return freed
    ranks, channels = int(ops.first_rank[-1]), int(ops.channel.max(initial=0)) + 1
    line = (ops.rank[sends] * ranks + ops.peer[sends]) * channels + ops.channel[sends]
    order = np.lexsort((place[sends], line))
    in_line = sends[order]
    waiting = np.flatnonzero(place[in_line] >= capacity)
    freed[in_line[waiting]] = other[in_line[waiting - capacity]]
    return freed


def accesses(ops: JoinedOps) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every touch of a slot: operation, place, and whether it writes."""
    count = len(ops.kind)
    local = np.flatnonzero(ops.source >= 0)
    index = np.concatenate([np.arange(count), local])
    slot = np.concatenate([ops.slot, ops.source[local]])
    writes = np.concatenate([ops.kind != int(OpKind.SEND), np.zeros(len(local), dtype=bool)])
    return index, slot, writes


def columns_are_sound(schedule: CollectiveSchedule) -> str | None:
    """Describe the first number out of range (rank, slot, `after`, ...), or return None."""
    ops: OpColumns = schedule.ops
    local = (ops.kind == int(OpKind.COPY)) | (ops.kind == int(OpKind.REDUCE))
    checks = (
        ("channel", ops.channel < 0),
        ("rank", (ops.rank < 0) | (ops.rank >= schedule.nodes)),
        ("slot", (ops.slot < 0) | (ops.slot >= schedule.slots)),
        ("peer", ~local & ((ops.peer < 0) | (ops.peer >= schedule.nodes) | (ops.peer == ops.rank))),
        ("source", local & ((ops.source < 0) | (ops.source >= schedule.slots))),
        ("after", ops.after >= schedule.operations),
    )
    for name, wrong in checks:
        if wrong.any():
            index = int(np.flatnonzero(wrong)[0])
            return f"operation {index} ({schedule.op(index)}) of rank {ops.rank[index]} has no such {name}"
    apart = (ops.after >= 0) & (ops.rank[np.maximum(ops.after, 0)] != ops.rank)
    if apart.any():
        return f"operation {int(np.flatnonzero(apart)[0])} waits for an operation of another rank"
    return None


def _place_in_group(group: np.ndarray) -> np.ndarray:
    """0, 1, 2, ... within equal values, in the order they stand."""
    order = np.argsort(group, kind="stable")
    ordered = group[order]
    new = np.ones(len(group), dtype=bool)
    new[1:] = ordered[1:] != ordered[:-1]
    begin = np.maximum.accumulate(np.where(new, np.arange(len(group)), 0))
    place = np.empty(len(group), dtype=np.int64)
    place[order] = np.arange(len(group)) - begin
    return place


def _offsets(counts: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
