"""How much of 16,384 GPUs is training, after failures have taken their share?

    MTTF     one over (nodes x failures of a node a day)
    ETTR     productive time over wall time, by the exact formula; drawn and lived through; published

The same failure rate, four ways to protect a job, four sizes: what a cluster is worth is decided by how one comes back.
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Lines, Outcome, Plot, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.cluster.reliability import Outlook
    from cairn.cluster.reliability_monte_carlo import Lived

SIZES = (1024, 4096, 16_384, 65_536, 131_072)


def run(bench: Workbench) -> Outcome:
    from cairn.cluster.reliability import RATES, SCHEMES, mttf, outlook
    from cairn.cluster.reliability_monte_carlo import live
    from cairn.cluster.reliability_published import META_MTTF

    rate = RATES["llama-3"]
    rows, lines = [], {name: [] for name in SCHEMES}
    for gpus in SIZES:
        found = [outlook(gpus, scheme, rate) for scheme in SCHEMES.values()]
        for name, one in zip(SCHEMES, found, strict=True):
            lines[name].append((float(gpus), one.ettr * 100))
        rows.append([gpus, found[0].mttf / 3600, *(one.ettr * 100 for one in found)])
    bench.step("16,384 GPUs, lived through")
    scheme = SCHEMES["async"]
    here = outlook(16_384, scheme, rate)
    lived = live(here.mttf, scheme, here.interval, failures=bench.pick(200_000, 30_000))
    published = {one.gpus: one.hours for one in META_MTTF}
    return Outcome(
        checks=_checks(here, lived, published),
        plots=[_plot(lines)],
        table=Table(
            columns=[
                Words("GPUs", "GPU 数"),
                Words("MTTF, h", "MTTF（小时）"),
                *(Words(f"{name}, %", f"{name} %") for name in SCHEMES),
            ],
            rows=rows,
        ),
        notes=[
            Words(
                f"At 16,384 GPUs each point of ETTR is {16_384 / 100:.0f} GPUs. Of the rest with `async`: "
                + ", ".join(f"{cause} {share:.1%}" for cause, share in here.lost.items())
                + f". Small jobs do worse than the model: RSC-1 saw {published[1024]} h at 1,024 GPUs, it says "
                f"{mttf(1024, RATES['rsc-1']) / 3600:.0f}.",
                f"16,384 卡时每个百分点就是 {16_384 / 100:.0f} 张卡。async 方案的损失："
                + "、".join(f"{cause} {share:.1%}" for cause, share in here.lost.items())
                + f"。小作业比模型差：RSC-1 在 1,024 卡上实测 {published[1024]} 小时，模型给出 "
                f"{mttf(1024, RATES['rsc-1']) / 3600:.0f} 小时。",
            )
        ],
    )


def _checks(here: "Outlook", lived: "Lived", published: dict[int, float]) -> list[Check]:
    from cairn.cluster.reliability import RATES, mttf

    return [
        Check(
            what=Words(
                "productive share at 16,384 GPUs, lived through", "16,384 卡有效时间比（模拟）"
            ),
            predicted=here.ettr * 100,
            measured=lived.ettr * 100,
            unit="%",
            within=0.01,
        ),
        Check(
            what=Words(
                "Llama 3 reported above 90% effective time; async scheme",
                "Llama 3 报告有效时间超过 90%；异步方案",
            ),
            predicted=90.0,
            measured=here.ettr * 100,
            unit="%",
            kind="at_least",
        ),
        Check(
            what=Words(
                "hours between failures at 131,072 GPUs, as RSC-1's authors project",
                "131,072 卡的 MTTF（RSC-1 作者的推算）",
            ),
            predicted=published[131_072],
            measured=mttf(131_072, RATES["rsc-1"]) / 3600,
            unit="h",
            within=0.05,
        ),
    ]


def _plot(lines: Lines) -> Plot:
    return Plot(
        title=Words("Productive share by job size", "有效时间比随规模的变化"),
        x=Words("GPUs", "GPU 数"),
        y=Words("% of the time", "时间占比 %"),
        lines=lines,
        log_x=True,
        limit=("no failures", 100.0),
    )


LAB = described(__file__, run)
