"""A schedule run on sets of ranks instead of numbers; several schedules in one pass.

    round    every thread whose next operation has all it waits for does that one operation
    send     carries the set that stands in its slot
    receive  puts it down, or joins it with what is there; the two must not overlap

A thread that can do nothing, while none can, hangs. What is found wrong is kept for each schedule:
the first complaint, in words. `verify` says what the run proves.
"""

import numpy as np

from cairn.comm.schedule import contract, waits
from cairn.comm.schedule.ops import CollectiveSchedule, OpKind
from cairn.comm.schedule.waits import NONE, JoinedOps


class SymbolicRun:
    """Symbolic execution of several schedules; in each round every thread that is not blocked does one operation."""

    def __init__(self, schedules: list[CollectiveSchedule], capacity: int) -> None:
        self.schedules, self.capacity = schedules, capacity
        self.ops: JoinedOps = waits.join(schedules)
        self.other, self.place = waits.pair(self.ops)
        self.width = max(contract.words(schedule.ranks) for schedule in schedules)
        begin = [contract.start(schedule, self.width) for schedule in schedules]
        self.which = np.concatenate([contents.which.ravel() for contents in begin])
        self.who = np.concatenate([contents.who.reshape(-1, self.width) for contents in begin])
        count = len(self.ops.kind)
        self.carried_which = np.full(count, contract.NOTHING)
        self.carried_who = np.zeros((count, self.width), dtype=np.uint64)
        self.done = np.zeros(count + 1, dtype=bool)
        self.done[NONE] = True
        self.time = np.zeros(count + 1, dtype=np.int64)
        self.when = np.zeros(count, dtype=np.int64)  # the round in which it ran
        self.problems: dict[int, str] = {}
        self.stuck: set[int] = set()

    def check(self) -> None:
        """Runs it all, then fills in `problems`, and in `stuck` those that hang."""
        self._run()
        self._check_hangs()
        self._check_races()
        self._check_end()

    def _run(self) -> None:
        ops = self.ops
        is_receive = (ops.kind == int(OpKind.RECV)) | (ops.kind == int(OpKind.RECV_REDUCE))
        # A half without its other half waits for an operation that never runs: for itself.
        own = np.arange(len(ops.kind))
        partner = np.where(is_receive, np.where(self.other == NONE, own, self.other), NONE)
        room = waits.room(ops, self.other, self.place, self.capacity)
        self.partner, self.room = partner, room
        head = ops.thread_begin.copy()
        clock, began = (np.zeros(len(head), dtype=np.int64) for _ in range(2))
        awake = np.arange(len(head))
        rounds = 0
        while len(awake):
            at = head[awake]
            can = self.done[partner[at]] & self.done[room[at]] & self.done[ops.after[at]]
            go, threads = at[can], awake[can]
            if not len(go):
                break
            self._stamp(go, threads, clock, began, rounds)
            self._execute(go)
            self.done[go] = True
            head[threads] += 1
            awake = awake[head[awake] < ops.thread_end[awake]]
            rounds += 1
        self.head, self.awake = head, awake

    def _stamp(
        self, go: np.ndarray, threads: np.ndarray, clock: np.ndarray, began: np.ndarray, rounds: int
    ) -> None:
        """When each operation happens, if a message takes 1 and a step posts its sends together."""
        ops, room, partner = self.ops, self.room[go], self.partner[go]
        step = ops.step[go]
        opens = np.ones(len(go), dtype=bool)
        opens[go > 0] = (ops.thread[go - 1] != ops.thread[go])[go > 0]
        opens |= ops.step[go - 1] != step
        began[threads[opens]] = clock[threads[opens]]
        posted = np.where(ops.kind[go] == int(OpKind.SEND), began[threads], clock[threads])
        freed = np.where((room != NONE) & (ops.step[room] != step), self.time[room], 0)
        arrived = self.time[partner] + (partner != NONE)
        when = np.maximum(np.maximum(posted, arrived), np.maximum(freed, self.time[ops.after[go]]))
        self.time[go], self.when[go] = when, rounds
        clock[threads] = np.maximum(clock[threads], when)

    def _execute(self, go: np.ndarray) -> None:
        """Reads first, then writes: what runs in one round does not see each other."""
        ops = self.ops
        kind = ops.kind[go]
        sends = go[kind == int(OpKind.SEND)]
        self.carried_which[sends] = self.which[ops.slot[sends]]
        self.carried_who[sends] = self.who[ops.slot[sends]]
        self._complain(
            sends, self.carried_which[sends] == contract.NOTHING, "reads a slot that holds nothing"
        )
        writes = go[kind != int(OpKind.SEND)]
        if not len(writes):
            return
        remote = self.partner[writes]
        local = ops.source[writes]
        is_local = remote == NONE
        which = np.where(is_local, self.which[local], self.carried_which[remote])
        who = np.where(is_local[:, None], self.who[local], self.carried_who[remote])
        self._complain(
            writes[is_local], which[is_local] == contract.NOTHING, "reads a slot that holds nothing"
        )
        slot, kind = ops.slot[writes], ops.kind[writes]
        adds = (kind == int(OpKind.RECV_REDUCE)) | (kind == int(OpKind.REDUCE))
        if adds.any():
            into, target = writes[adds], slot[adds]
            self._complain(into, self.which[target] != which[adds], "reduces two different chunks")
            twice = (self.who[target] & who[adds]).any(axis=1)
            self._complain(into, twice, "counts a contribution twice")
            who[adds] |= self.who[target]
        self.which[slot], self.who[slot] = which, who

    def _complain(self, ops: np.ndarray, wrong: np.ndarray, what: str) -> None:
        if not wrong.any():
            return
        for op in ops[wrong]:
            index = self._schedule_of(int(op))
            if index not in self.problems:
                self.problems[index] = f"{self._name(int(op))} {what}"

    def _check_hangs(self) -> None:
        if not len(self.awake):
            return
        heads = self.head[self.awake]
        for index in np.unique(np.searchsorted(self.ops.first_op, heads, side="right") - 1):
            begin, end = self.ops.first_op[index], self.ops.first_op[index + 1]
            mine = heads[(heads >= begin) & (heads < end)]
            lonely = mine[self.partner[mine] == mine]
            if len(lonely):
                self.problems.setdefault(
                    int(index), f"{self._name(int(lonely[0]))}, which no rank sends"
                )
                continue
            self.stuck.add(int(index))
            shown = "; ".join(self._waiting(int(op)) for op in mine[:3])
            self.problems.setdefault(
                int(index), f"hangs with {self.capacity} chunk(s) for each connection: {shown}"
            )

    def _check_races(self) -> None:
        """Two threads of a rank touch a slot, one writes, and nothing says which goes first."""
        ops = self.ops
        if not ops.channel.max(initial=0):
            return
        index, slot, writes = waits.accesses(ops)
        order = np.lexsort((self.when[index], slot))
        index, slot, writes = index[order], slot[order], writes[order]
        known_done = self._seen()
        for apart in range(1, len(index)):
            same = slot[apart:] == slot[:-apart]
            if not same.any():
                return
            early, late = index[:-apart], index[apart:]
            touching = (
                same & (ops.thread[early] != ops.thread[late]) & (writes[apart:] | writes[:-apart])
            )
            unordered = touching & (known_done[late, ops.channel[early]] < early)
            self._complain(late, unordered, "races with another channel of its rank")

    def _seen(self) -> np.ndarray:
        """The last operation known to be complete before each operation, for every channel of its rank."""
        ops = self.ops
        known_done = np.full((len(ops.kind), int(ops.channel.max()) + 1), NONE)
        order = np.argsort(self.when, kind="stable")
        first = np.isin(np.arange(len(ops.kind)), ops.thread_begin)
        ends = np.flatnonzero(np.diff(self.when[order])) + 1
        for batch in np.split(order, ends):
            before = np.where(first[batch, None], NONE, known_done[batch - 1])
            waited = ops.after[batch]
            from_other_channel = np.where(waited[:, None] == NONE, NONE, known_done[waited])
            known_done[batch] = np.maximum(before, from_other_channel)
            has = batch[waited != NONE]
            known_done[has, ops.channel[ops.after[has]]] = np.maximum(
                known_done[has, ops.channel[ops.after[has]]], ops.after[has]
            )
            known_done[batch, ops.channel[batch]] = batch
        return known_done

    def _check_end(self) -> None:
        ops = self.ops
        unheard = (ops.kind == int(OpKind.SEND)) & (self.other == NONE)
        self._complain(np.arange(len(ops.kind)), unheard, "is never received")
        for index, schedule in enumerate(self.schedules):
            if index in self.problems:
                continue
            begin, end = ops.first_slot[index], ops.first_slot[index + 1]
            want = contract.end(schedule, self.width)
            wanted = want.which.ravel() != contract.NOTHING
            wrong = self.which[begin:end] != want.which.ravel()
            wrong |= (self.who[begin:end] != want.who.reshape(-1, self.width)).any(axis=1)
            if (wrong & wanted).any():
                place = int(np.flatnonzero(wrong & wanted)[0])
                self.problems[index] = self._differs(schedule, int(begin), place, want)

    def _differs(
        self, schedule: CollectiveSchedule, begin: int, place: int, want: contract.SlotContents
    ) -> str:
        rank, slot = divmod(place, schedule.slots)
        has, must = _members(self.who[begin + place]), _members(want.who[rank, slot])
        if has == must:
            return (
                f"rank {rank} ends with chunk {self.which[begin + place]} in slot {slot}, "
                f"not with chunk {want.which[rank, slot]}"
            )
        return f"rank {rank} ends with the contributions of {has} in slot {slot}, not of {must}"

    def _schedule_of(self, op: int) -> int:
        return int(np.searchsorted(self.ops.first_op, op, side="right")) - 1

    def _name(self, op: int) -> str:
        index = self._schedule_of(op)
        readable = self.schedules[index].op(op - int(self.ops.first_op[index]))
        return f"`{readable}` of rank {readable.rank}"

    def _waiting(self, op: int) -> str:
        if self.ops.kind[op] == int(OpKind.SEND) and not self.done[self.room[op]]:
            return f"{self._name(op)} waits for room"
        if not self.done[self.ops.after[op]]:
            return f"{self._name(op)} waits for another channel"
        return f"{self._name(op)} waits for its message"


def _members(who: np.ndarray) -> list[int]:
    return [
        word * contract.BITS + bit
        for word, bits in enumerate(who.tolist())
        for bit in range(contract.BITS)
        if bits >> bit & 1
    ]
