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
from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
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
    found = run_ranks(RANKS, steps, bench.pick(14, 8))
    for rank, (_, _, recording) in enumerate(found):
        (bench.folder / f"fr_rank_{rank}").write_bytes(recording)
    bench.step("the doctor reads the recordings")
    findings = diagnose([bench.folder]).findings
    named = [one for one in findings if one.cause == "straggler" and f"rank {LATE}" in one.where]
    step_s = [median(whole) for whole, _, _ in found]
    wait_s = [median(waiting) for _, waiting, _ in found]
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


LAB = Lab(
    name="straggler",
    area="comm",
    title=Words("One slow rank slows all of them", "一个慢 rank 拖慢所有人"),
    hypothesis=Words(
        "Every rank's step takes as long as the slowest rank's; the others show it as time "
        "inside the all-reduce, and the "
        "rank that waits least is the one to blame.",
        "所有 rank 的单步时间都等于最慢者；其余 rank 把它体现为 all-reduce 里的时间，等待最少的那个才是元凶。",
    ),
    run=run,
    causes=(
        Words(
            "a loaded machine: with four ranks on few cores every rank is late now and then",
            "机器负载高：四个 rank 挤在少数核上，谁都会偶尔迟到",
        ),
        Words(
            "sleep lasts longer than asked for, by the scheduler's tick and its queue",
            "sleep 受调度时钟和队列影响，实际比要求的更长",
        ),
    ),
    code=(
        "cairn/comm/doctor/traces.py:examine",
        "cairn/comm/doctor/diagnose.py:diagnose",
        "cairn/comm/doctor/ranks.py:flight_recording",
    ),
    reading=(
        "MegaScale: Scaling Large Language Model Training to More Than 10,000 GPUs (2024)",
        "The Tail at Scale (2013)",
    ),
    questions=(
        Question(
            Words(
                "A profile shows 60% of the time in all-reduce on 7 of 8 ranks. Is the network slow?",
                "profile 显示 8 个 rank 中有 7 个 60% 时间在 all-reduce，是网络慢吗？",
            ),
            Words(
                "Probably not: if one rank spends little time there, the others wait for it. "
                "Compare when ranks enter the "
                "same collective, not how long they are in it.",
                "多半不是：若有一个 rank 在里面时间很短，其他都在等它。应比较各 rank 进入同一集"
                "合通信的时刻，而不是停留时长。",
            ),
        ),
        Question(
            Words("What makes one GPU of many slow?", "众多 GPU 中某一块变慢常见原因有哪些？"),
            Words(
                "Thermal or power throttling, ECC page retirement, a PCIe link that trained "
                "down, another process on the "
                "host, garbage collection or a slow data loader on that rank.",
                "过热或功耗降频、ECC 页退役、PCIe 降速、主机上有其他进程、该 rank 的 GC 或数据加载慢。",
            ),
        ),
        Question(
            Words(
                "Why does the cost of stragglers grow with the number of ranks?",
                "为什么 rank 越多，慢节点代价越大？",
            ),
            Words(
                "A step takes the maximum over all ranks: if each is late with probability p, some rank is late with "
                "1 - (1-p)^n. With p of 0.1% and 4,096 ranks that is 98% of the steps.",
                "单步时间是所有 rank 的最大值：每个以概率 p 迟到时，有人迟到的概率是 1-(1-p)^n；"
                "p=0.1%、4096 个 rank 时 98% 的步都会受影响。",
            ),
        ),
    ),
    needs=("2 processes",),
    seconds=4.0,
)
