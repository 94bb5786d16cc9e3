"""Restart policy of a job: a table with one action for each cause of a process's end.

    Evidence --core/exit_cause--> cause --POLICIES--> Action: again or not, here or elsewhere, after how long

    oom          again, twice at most: it may have been a neighbour's memory; then the job is told to need more
    user         never again: it would fail the same way
    hardware     again, elsewhere, and the node is looked at
    network      again, here, after a pause that grows
    preemption   again, back in the queue; no failure, so it does not count
    hang         again; the node gets a strike
    straggler    again, elsewhere; the node gets a strike
    corruption   again from the last state that all agreed on; the node gets a strike

Pure: the same table serves a local launcher, a scheduler backend and a simulator. Inside one training run the finer
answers (a spare, fewer replicas) are the ladder's (`train/recovery/ladder`).
"""

from typing import Literal

import msgspec

from cairn.core.exit_cause import CAUSES, Cause, CauseVerdict, ExitEvidence, classify

Again = Literal["done", "here", "elsewhere", "queue", "never"]


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    again: Again
    most: int | None = None  # times in a row for this cause; None: only the job's own limit
    counts: bool = True  # against the job's limit
    strike: bool = False  # laid to the node
    cordon: bool = False  # the node is taken out at once
    wait_s: float = 0.0  # before the first time; doubles with each further one
    most_wait_s: float = 60.0


POLICIES: dict[Cause, RestartPolicy] = {
    "finished": RestartPolicy(again="done", counts=False),
    "oom": RestartPolicy(again="here", most=2),
    "user": RestartPolicy(again="never"),
    "hardware": RestartPolicy(again="elsewhere", strike=True, cordon=True),
    "network": RestartPolicy(again="here", strike=True, wait_s=1.0),
    "preemption": RestartPolicy(again="queue", counts=False),
    "hang": RestartPolicy(again="here", strike=True),
    "straggler": RestartPolicy(again="elsewhere", strike=True),
    "corruption": RestartPolicy(again="here", strike=True),
    "killed": RestartPolicy(again="here", strike=True),
    "unknown": RestartPolicy(again="here", most=3, strike=True, wait_s=1.0),
}


class RestartHistory(msgspec.Struct, frozen=True):
    """Restarts of this job so far."""

    counted: int = 0  # failures that count against its limit
    in_a_row: dict[str, int] = {}  # cause -> times since something else happened
    limit: int = 3


class RestartAction(msgspec.Struct, frozen=True, kw_only=True):
    again: Again
    cause: Cause
    why: str  # in one line, for `cairn jobs why`
    wait_s: float = 0.0
    strike: bool = False
    cordon: bool = False


def decide(evidence: ExitEvidence, history: RestartHistory) -> tuple[RestartAction, RestartHistory]:
    """The action for this failure, and the updated history."""
    return answer(classify(evidence), history)


def answer(verdict: CauseVerdict, history: RestartHistory) -> tuple[RestartAction, RestartHistory]:
    """The same, where the cause is known already."""
    policy = POLICIES[verdict.cause]
    times = history.in_a_row.get(verdict.cause, 0) + 1
    after = RestartHistory(history.counted + policy.counts, {verdict.cause: times}, history.limit)
    return _action(verdict, policy, times, after), after


def _action(
    verdict: CauseVerdict, policy: RestartPolicy, times: int, after: RestartHistory
) -> RestartAction:
    reason = None
    if policy.again not in ("done", "never"):
        if policy.most is not None and times > policy.most:
            reason = f"{times} times in a row, {policy.most} are tried"
        elif policy.counts and after.counted > after.limit:
            reason = f"{after.counted} failures, {after.limit} are allowed"
    again: Again = "never" if reason else policy.again
    longer = min(policy.wait_s * 2 ** min(times - 1, 30), policy.most_wait_s)
    wait_s = longer if again in ("here", "elsewhere") else 0.0
    return RestartAction(
        again=again,
        cause=verdict.cause,
        why=f"{verdict.why}; {reason}" if reason else verdict.why,
        wait_s=wait_s,
        strike=policy.strike,
        cordon=policy.cordon,
    )


assert set(POLICIES) == set(CAUSES), "every cause has a policy"
