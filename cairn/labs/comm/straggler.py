"""What does one slow rank cost the others, and can the recordings name it?

    rank 0  |compute|......... waits ........|all-reduce|
    rank 1  |compute|......... waits ........|all-reduce|
    rank 2  |compute ........................|all-reduce|   <- everyone takes this long

Four ranks compute (sleep) and all-reduce; one of them computes longer. Every rank leaves torch's flight recording, and
the doctor reads the four files.
"""

import time
from statistics import median

from cairn.comm.doctor.diagnose import diagnose
from cairn.comm.doctor.ranks import flight_recording
from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.ranks import run_ranks
from cairn.labs.workbench import Workbench

RANKS, LATE = 4, 2
USUAL_S, LATE_S = 0.03, 0.12


def steps(rank: int, count: int, rounds: int) -> tuple[list[float], list[float], bytes]:
    """Seconds of each step, seconds spent in the collective, and the recording."""
    import torch
    import torch.distributed as dist

    whole, waiting = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        time.sleep(LATE_S if rank == LATE else USUAL_S)
        entered = time.perf_counter()
        dist.all_reduce(torch.ones(1000))
        whole.append(time.perf_counter() - began)
        waiting.append(time.perf_counter() - entered)
    return whole, waiting, flight_recording()


def run(bench: Workbench) -> Outcome:
    bench.step(f"{RANKS} ranks, rank {LATE} computes {LATE_S / USUAL_S:g} times as long")
    by_rank = run_ranks(RANKS, steps, bench.pick(10, 8))
    for rank, (_, _, recording) in enumerate(by_rank):
        (bench.folder / f"fr_rank_{rank}").write_bytes(recording)
    bench.step("the doctor reads the recordings")
    findings = diagnose([bench.folder]).findings
    named = [one for one in findings if one.cause == "straggler" and f"rank {LATE}" in one.where]
    step_s = [median(whole) for whole, _, _ in by_rank]
    wait_s = [median(waiting) for _, waiting, _ in by_rank]
    innocent = median(step_s[rank] for rank in range(RANKS) if rank != LATE)
    return Outcome(
        checks=[
            Check(
                what=Words("step of the ranks that are not slow", "正常 rank 的单步时间"),
                predicted=LATE_S,
                measured=innocent,
                unit="s",
                within=0.35,
            ),
            Check(
                what=Words("share of their step that they wait", "正常 rank 等待时间占比"),
                predicted=1 - USUAL_S / LATE_S,
                measured=median(wait_s[r] / step_s[r] for r in range(RANKS) if r != LATE),
                unit="share",
                within=0.25,
            ),
            Check(
                what=Words("slow ranks that the doctor names", "doctor 指认出的慢 rank 数"),
                predicted=1,
                measured=len(named),
                unit="findings",
            ),
        ],
        table=Table(
            columns=[
                Words("rank", "rank"),
                Words("step, ms", "单步 ms"),
                Words("in the collective, ms", "集合通信内 ms"),
            ],
            rows=[[rank, step_s[rank] * 1e3, wait_s[rank] * 1e3] for rank in range(RANKS)],
        ),
        notes=[
            Words(
                f"the doctor: {one.cause}, {one.where}: {one.evidence[0]}",
                f"doctor：{one.cause}，{one.where}：{one.evidence[0]}",
            )
            for one in findings
        ],
    )


LAB = described(__file__, run)
