"""How many of its steps does a job keep, after failures have taken their share? Predicted, then lived with kill -9.

    steps  ████████w████████w███x     ████████w        w writes a checkpoint, x is killed
                             lost

A small run with this project's own checkpoints is killed after a drawn number of steps, again and again. The accounting
behind the 16,384-GPU figures, counted in steps, says how many it keeps: a busy machine makes the run longer and changes
none of them. The same accounting in seconds, with published failure rates, gives the table.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cairn.labs.cluster._trainee import kill_at, resume, start
from cairn.labs.lab import Check, Lines, Outcome, Plot, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.cluster.reliability import Outlook

SIZES = (1024, 4096, 16_384, 65_536, 131_072)
EVERY, PAUSE_S = 8, 0.004
MEAN_STEPS = 24  # between two kills
ENDLESS = 10**6


class Life(NamedTuple):
    done: list[int]  # steps between two kills, from where the run came back
    kept: int  # steps that a checkpoint holds at the end


def run(bench: Workbench) -> Outcome:
    bench.step("killed again and again")
    began = time.perf_counter()
    life = lived(bench.folder, drawn(bench.size("kills")))
    wall, total = time.perf_counter() - began, max(1, sum(life.done))
    return Outcome(
        checks=[_steps(expected_steps(life.done), life.kept), *_published()],
        plots=[_plot(_lines())],
        table=_table(),
        notes=[
            Words(
                f"{len(life.done)} kills in {wall:.1f} s: of {total} steps {life.kept} were kept, "
                f"{life.kept / total:.0%}.",
                f"{wall:.1f} 秒内杀 {len(life.done)} 次：{total} 步中保住 {life.kept} 步，占 {life.kept / total:.0%}。",
            )
        ],
    )


def drawn(count: int) -> list[int]:
    """Steps between failures without memory, at least one; with the mean that the learner is told."""
    import numpy as np

    gaps = np.random.default_rng(4).exponential(size=count)
    return [max(1, round(gap)) for gap in gaps * MEAN_STEPS / gaps.mean()]


def lived(root: Path, gaps: list[int]) -> Life:
    """One process after another in the same folder; each is killed when it has made its steps."""
    kills = []
    for gap in gaps:
        began = resume(root, []).step
        process = start(root, ENDLESS, EVERY, PAUSE_S)
        kills.append(kill_at(root, process, began + gap) - began)
    return Life(kills, resume(root, []).step)


def expected_steps(done: list[int]) -> float:
    """What the accounting of the large jobs says about these very failures, with a step as its unit of time."""
    import numpy as np

    from cairn.cluster.reliability import RecoveryScheme
    from cairn.cluster.reliability_monte_carlo import accounted

    scheme = RecoveryScheme(name="kill", about="kill -9", write=0.0, detect=0.0, restart=0.0)
    return float(accounted(np.array(done, float), scheme, EVERY)[0].sum())


def _steps(foreseen: float, kept: int) -> Check:
    return Check(
        what=Words("steps that were kept through all kills", "历次被杀后保住的步数"),
        predicted=foreseen,
        measured=kept,
        unit="steps",
        within=0.1,  # a kill between a checkpoint and the note of its step
    )


def _published() -> list[Check]:
    from cairn.cluster.reliability import RATES, mttf
    from cairn.cluster.reliability_published import META_MTTF

    hours = {one.gpus: one.hours for one in META_MTTF}
    return [
        Check(
            what=Words(
                "Llama 3 reported above 90% effective time; async scheme",
                "Llama 3 报告有效时间超过 90%；异步方案",
            ),
            predicted=90.0,
            measured=_outlook("async").ettr * 100,
            unit="%",
            kind="at_least",
            simulated=True,
        ),
        Check(
            what=Words(
                "hours between failures at 131,072 GPUs, as RSC-1's authors project",
                "131,072 卡的 MTTF（RSC-1 作者的推算）",
            ),
            predicted=hours[131_072],
            measured=mttf(131_072, RATES["rsc-1"]) / 3600,
            unit="h",
            within=0.05,
            simulated=True,
        ),
    ]


def _outlook(scheme: str, gpus: int = 16_384) -> "Outlook":
    from cairn.cluster.reliability import RATES, SCHEMES, outlook

    return outlook(gpus, SCHEMES[scheme], RATES["llama-3"])


def _lines() -> Lines:
    from cairn.cluster.reliability import SCHEMES

    return {
        name: [(float(gpus), _outlook(name, gpus).ettr * 100) for gpus in SIZES] for name in SCHEMES
    }


def _table() -> Table:
    from cairn.cluster.reliability import SCHEMES

    return Table(
        columns=[
            Words("GPUs", "GPU 数"),
            Words("MTTF, h", "MTTF（小时）"),
            *(Words(f"{name}, %", f"{name} %") for name in SCHEMES),
        ],
        rows=[
            [
                gpus,
                _outlook("async", gpus).mttf / 3600,
                *(_outlook(name, gpus).ettr * 100 for name in SCHEMES),
            ]
            for gpus in SIZES
        ],
    )


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
