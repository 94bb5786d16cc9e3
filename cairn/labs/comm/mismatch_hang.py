"""What happens when ranks disagree, or one never comes? Loud at once, or silent until the timeout: both on purpose.

    mismatch   rank 1 brings another size         this backend: an error on every rank, at once, that names it
    hang       rank 1 stays away                  an error after the timeout, that names whom it waited for

Ranks of this project's own backend, with a short timeout. What a library without these checks does is to compute
nonsense or to hang; the doctor finds out afterwards, from flight recordings.
"""

import time
from typing import NamedTuple

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.ranks import run_ranks
from cairn.labs.workbench import Workbench

RANKS, WRONG = 3, 1


class Answer(NamedTuple):
    """What a rank got: the kind of error, its text, and after how many seconds."""

    kind: str
    text: str
    seconds: float


def told(rank: int, count: int, how: str, timeout_s: float) -> tuple[str, str, float]:
    """The error that this rank got, its text, and after how many seconds."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    group = dist.new_group(backend="cairn", timeout=timedelta(seconds=timeout_s))
    vector = torch.ones(1000)
    dist.all_reduce(vector, group=group)
    began = time.perf_counter()
    try:
        if rank == WRONG and how == "hang":
            time.sleep(2 * timeout_s)  # alive, and busy with something else
        if rank == WRONG and how == "mismatch":
            vector = torch.ones(1001)
        dist.all_reduce(vector, group=group)
        outcome = ("none", "", time.perf_counter() - began)
    except Exception as error:  # noqa: BLE001  every kind is part of the answer
        outcome = (type(error).__name__, str(error), time.perf_counter() - began)
    dist.destroy_process_group()
    return outcome


def run(bench: Workbench) -> Outcome:
    timeout_s = bench.setting("timeout_s", bench.pick(0.8, 0.7))
    answers = {}
    for how in ("mismatch", "hang"):
        bench.step(f"{RANKS} ranks: {how}")
        answers[how] = run_ranks(RANKS, told, how, timeout_s, backend="gloo", timeout_s=40.0)
    mismatch, hang = ([Answer(*one) for one in answers[how]] for how in ("mismatch", "hang"))
    return Outcome(
        checks=[*_of_mismatch(mismatch, timeout_s), *_of_hang(hang, timeout_s)],
        table=Table(
            columns=[
                Words("case", "情形"),
                Words("rank", "rank"),
                Words("error", "错误"),
                Words("after s", "经过秒数"),
            ],
            rows=[
                [how, rank, kind, seconds]
                for how, reports in answers.items()
                for rank, (kind, _, seconds) in enumerate(reports)
            ],
        ),
        notes=[Words(text[:300], text[:300]) for _, text, _ in (mismatch[0], hang[0]) if text],
    )


def _of_mismatch(reports: list[Answer], timeout_s: float) -> list[Check]:
    return [
        Check(
            what=Words("mismatch: ranks that got an error", "不一致：收到错误的 rank 数"),
            predicted=RANKS,
            measured=sum(one.kind != "none" for one in reports),
            unit="ranks",
        ),
        Check(
            what=Words("mismatch: seconds until the last knew", "不一致：最后一个 rank 得知的时间"),
            predicted=timeout_s / 2,
            measured=max(one.seconds for one in reports),
            unit="s",
            kind="at_most",
            within=0.5,
        ),
        Check(
            # The rank that sees it first tells the others and names both sides; it may be the wrong one itself.
            what=Words("mismatch: errors that name the rank", "不一致：指明该 rank 的错误数"),
            predicted=RANKS,
            measured=sum(f"rank {WRONG}" in one.text.partition(": ")[2] for one in reports),
            unit="ranks",
        ),
    ]


def _of_hang(reports: list[Answer], timeout_s: float) -> list[Check]:
    waiting = [one for rank, one in enumerate(reports) if rank != WRONG]
    return [
        Check(
            what=Words("hang: ranks that got an error", "挂起：收到错误的 rank 数"),
            predicted=RANKS,
            measured=sum(one.kind != "none" for one in reports),
            unit="ranks",
        ),
        Check(
            what=Words("hang: seconds until the first knew", "挂起：第一个 rank 得知的时间"),
            predicted=timeout_s,
            measured=min(one.seconds for one in waiting),
            unit="s",
            within=0.5,
        ),
        Check(
            what=Words(
                "hang: waiting ranks whose error names the rank", "挂起：错误中指明该 rank 的等待者"
            ),
            predicted=RANKS - 1,
            measured=sum(f"rank {WRONG}" in one.text for one in waiting),
            unit="ranks",
        ),
    ]


LAB = described(__file__, run)
