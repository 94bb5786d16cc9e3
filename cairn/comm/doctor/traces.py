"""Rules for the traces of all ranks: hangs, mismatched collectives, stragglers.

    rank 0   all_reduce #7 ......... waits
    rank 1   all_reduce #7 ......... waits
    rank 2   all_reduce #6 done      has not come: the cause of the hang

Ranks are compared group by group. Late is judged by when ranks enter the same collective: the one for
which all others wait, again and again, is a straggler; its computation is slow, not the network.
Where the dumps say when a collective ended (NCCL's do), entering is counted back from there, because
all leave together and clocks of hosts differ; without (gloo) clocks must agree.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np

from cairn.comm.doctor.findings import CommFinding, RankTrace, RecordedCall, ranked

LATE_MS = 10.0  # less is noise
OFTEN = 0.75  # of the collectives in which the same rank is last
FEWEST = 4  # collectives to judge by


def examine(traces: list[RankTrace]) -> list[CommFinding]:
    """The first thing that went wrong in each group; a run that is wrong is not judged for its speed."""
    if not traces:
        return []
    found: list[CommFinding] = []
    for group, members in _groups(traces).items():
        calls = {t.rank: {c.sequence: c for c in t.calls if c.group == group} for t in traces}
        calls = {rank: calls.get(rank, {}) for rank in members}
        absent = [rank for rank in members if rank not in {t.rank for t in traces}]
        problem = (
            _mismatch(group, calls) or _hang(group, calls, absent) or _gone(group, calls, absent)
        )
        if problem is None:
            problem = _straggler(group, calls)
        found += [problem] if problem else []
    return found


def _groups(traces: list[RankTrace]) -> dict[str, list[int]]:
    """Members of each group: as the dumps say, or else the ranks that have calls of it."""
    members: dict[str, set[int]] = defaultdict(set)
    for trace in traces:
        for call in trace.calls:
            members[call.group].add(trace.rank)
    for trace in traces:
        for group, ranks in trace.groups.items():
            if group in members:
                members[group] |= set(ranks)
    return {group: sorted(ranks) for group, ranks in members.items() if len(ranks) > 1}


def _mismatch(group: str, calls: Mapping[int, Mapping[int, RecordedCall]]) -> CommFinding | None:
    """The first number at which ranks are not in the same collective, or not with the same sizes."""
    for sequence in sorted({number for mine in calls.values() for number in mine}):
        here = {rank: mine[sequence] for rank, mine in calls.items() if sequence in mine}
        if len(here) < 2:
            continue
        for what, of in (("operation", _op), ("type", _dtype), ("size", _size)):
            values = {rank: of(call) for rank, call in here.items()}
            if len(set(values.values())) == 1:
                continue
            usual = Counter(values.values()).most_common(1)[0][0]
            odd = sorted(rank for rank, value in values.items() if value != usual)
            first = next(rank for rank in here if rank not in odd)
            return CommFinding(
                cause="mismatch",
                where=ranked(odd),
                evidence=[
                    f"collective #{sequence} of group {group}: {ranked(odd)} "
                    f"has {what} {values[odd[0]]}, {ranked([first])} {usual}",
                    *_frames(here, [odd[0], first]),
                ],
                advice=f"all ranks must call the same collective with the same {what}; look at "
                f"what {ranked(odd[:1])} does before #{sequence}",
            )
    return None


def _hang(
    group: str, calls: Mapping[int, Mapping[int, RecordedCall]], absent: list[int]
) -> CommFinding | None:
    """A rank waits in a collective that another has not entered, or only when all was over."""
    calls = {
        rank: {number: call for number, call in mine.items() if not call.refused}
        for rank, mine in calls.items()
    }
    last = {rank: max(mine, default=0) for rank, mine in calls.items()}
    unfinished = {rank: [c for c in mine.values() if not c.done] for rank, mine in calls.items()}
    waiting = {
        rank: min(mine, key=lambda call: call.sequence) for rank, mine in unfinished.items() if mine
    }
    if not waiting:
        return None
    sequence = min(call.sequence for call in waiting.values())
    missing = sorted(rank for rank, number in last.items() if number < sequence)
    call = next(c for c in waiting.values() if c.sequence == sequence)
    stuck = sorted(rank for rank, one in waiting.items() if one.sequence >= sequence)
    if not missing:
        return _all_inside(group, calls, call, stuck)
    verb = "waits" if len(stuck) == 1 else "wait"
    evidence = [f"{ranked(stuck)} {verb} in {call.op} #{sequence} of group {group} {call.shapes}"]
    evidence += [_where_it_ends(rank, calls[rank], absent) for rank in missing[:4]]
    return CommFinding(
        cause="hang",
        where=ranked(missing),
        evidence=[*evidence, *_frames(waiting, stuck[:1])],
        advice=f"look at {ranked(missing[:1])}: its own log, its stack (py-spy dump), its host",
    )


def _all_inside(
    group: str,
    calls: Mapping[int, Mapping[int, RecordedCall]],
    call: RecordedCall,
    stuck: list[int],
) -> CommFinding | None:
    """Every rank has entered this call; None if some are through it already, and the others are about to be."""
    # A rank that has gone on and keeps few records has forgotten this one.
    records = {rank: calls[rank].get(call.sequence) for rank in stuck}
    started = [rank for rank, one in records.items() if one is None or one.started]
    if len(stuck) < len(calls) or not started:
        return None
    return CommFinding(
        cause="hang",
        where=ranked(stuck),
        evidence=[
            f"all ranks are in {call.op} #{call.sequence} of group {group}, none has left it"
        ],
        advice="the network or a GPU does not go on: look for errors of NICs and links (XID, "
        "link down) on these hosts",
    )


def _where_it_ends(rank: int, calls: Mapping[int, RecordedCall], absent: list[int]) -> str:
    """The last call of a rank that has not entered the one in which others wait."""
    if rank in absent:
        return f"rank {rank} left no dump: its process may have died"
    if not calls:
        return f"rank {rank} has entered no collective of this group"
    final = calls[max(calls)]
    done = "" if final.done else ", which is not done"
    return f"rank {rank} ends with {final.op} #{max(calls)}{done}"


def _gone(
    group: str, calls: Mapping[int, Mapping[int, RecordedCall]], absent: list[int]
) -> CommFinding | None:
    """No rank waits any more, because the connection broke; but a few ranks of many left no dump."""
    if not absent or 2 * len(absent) >= len(calls):
        return None
    last = max((number, rank) for rank, mine in calls.items() for number in mine)
    return CommFinding(
        cause="hang",
        where=ranked(absent),
        evidence=[
            f"{ranked(absent)} left no dump, the {len(calls) - len(absent)} others of group {group} did",
            f"they end with {calls[last[1]][last[0]].op} #{last[0]}",
        ],
        advice=f"the process of {ranked(absent[:1])} has died, or its dump is missing here: see its log",
    )


def _straggler(group: str, calls: Mapping[int, Mapping[int, RecordedCall]]) -> CommFinding | None:
    """The same rank last, nearly always, by more than noise."""
    ranks = sorted(calls)
    known = [mine for mine in calls.values() if mine]
    ranks = [rank for rank in ranks if calls[rank]]
    shared = sorted(set.intersection(*({*mine} for mine in known))) if len(known) > 1 else []
    if len(shared) < FEWEST:
        return None
    entered = np.array([[calls[r][s].entered_ns for r in ranks] for s in shared]) / 1e6
    began = entered[:, 0]
    ends = [[calls[r][s].ended_ns for r in ranks] for s in shared]
    if all(end is not None for row in ends for end in row):
        entered = entered - np.array(ends, dtype=float) / 1e6
    order = np.sort(entered, axis=1)
    last = entered.argmax(axis=1)
    rank, times = Counter(last.tolist()).most_common(1)[0]
    # How much later than the one before it, counted as nothing where another was last.
    lateness = np.where(last == rank, order[:, -1] - order[:, -2], 0.0)
    typical = float(np.median(lateness))
    step = float(np.median(np.diff(began)))
    if times < OFTEN * len(shared) or typical < max(LATE_MS, 0.05 * step):
        return None
    return CommFinding(
        cause="straggler",
        where=f"rank {ranks[rank]}",
        evidence=[
            f"last to enter {times} of {len(shared)} collectives of group {group}, "
            f"{typical:.1f} ms after all others (median)",
            f"the others are within {float(np.median(order[:, -2] - order[:, 0])):.1f} ms of each other",
        ],
        advice="its computation is slow, not the network: compare its GPU clocks, its share of the "
        "data and its host's load with those of the others",
    )


def _op(call: RecordedCall) -> str:
    return call.op


def _dtype(call: RecordedCall) -> str:
    return call.dtypes


def _size(call: RecordedCall) -> str:
    """Broadcast, gather and scatter have other inputs on the root."""
    uneven = ("broadcast", "gather", "scatter", "reduce", "barrier", "all_to_all")
    if call.op.startswith(uneven) and not call.op.startswith(("reduce_scatter", "all_gather")):
        return "any"
    return call.shapes


def _frames(calls: Mapping[int, RecordedCall], ranks: list[int]) -> list[str]:
    return [f"rank {rank} called it at {calls[rank].frame}" for rank in ranks if calls[rank].frame]
