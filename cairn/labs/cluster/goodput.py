"""How much of the time does a job train, after failures have taken their share? Predicted, then lived with kill -9.

    ████████w████████w███x···· ████████w        w writes a checkpoint, x is killed, ···· comes back
             <--- lost --->

A small run with this project's own checkpoints is killed at drawn moments. Its steps, its writes and one way back are
timed once; from them the accounting behind the 16,384-GPU figures says how many steps it should keep. The same
accounting, with published failure rates, gives the table.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cairn.labs.cluster._trainee import step_of, train
from cairn.labs.lab import Check, Lines, Outcome, Plot, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from cairn.cluster.reliability import Outlook

SIZES = (1024, 4096, 16_384, 65_536, 131_072)
EVERY, PAUSE_S = 8, 0.004
MEAN_S = 0.4  # of the time between two kills, beyond the way back
ENDLESS = 10**6
PATIENCE_S = 20.0


class Pace(NamedTuple):
    """What one run without failures shows."""

    step_s: float
    write_s: float  # of a checkpoint
    outage_s: float  # from a kill to the first step after it, beyond that step itself


class Life(NamedTuple):
    up_s: list[float]  # between kills, from the start of the process
    kept: int  # steps that a checkpoint holds at the end


def run(bench: Workbench) -> Outcome:
    bench.step("a run without failures")
    pace = paced(bench.folder / "calm")
    bench.step("killed again and again")
    began = time.perf_counter()
    life = lived(bench.folder / "broken", drawn(bench.setting("kills", bench.pick(8, 5)), pace))
    wall = time.perf_counter() - began
    foreseen = expected_steps(life.up_s, pace)
    return Outcome(
        checks=[
            _steps(foreseen, life.kept),
            *_published(),
        ],
        plots=[_plot(_lines())],
        table=_table(),
        notes=[
            Words(
                f"{len(life.up_s)} kills in {wall:.1f} s; a step {pace.step_s * 1e3:.1f} ms, a checkpoint "
                f"{pace.write_s * 1e3:.1f} ms, the way back {pace.outage_s * 1e3:.0f} ms: "
                f"{life.kept * pace.step_s / wall:.0%} of the time was kept.",
                f"{wall:.1f} 秒内杀 {len(life.up_s)} 次；每步 {pace.step_s * 1e3:.1f} ms，写 checkpoint "
                f"{pace.write_s * 1e3:.1f} ms，恢复 {pace.outage_s * 1e3:.0f} ms："
                f"{life.kept * pace.step_s / wall:.0%} 的时间有效。",
            )
        ],
    )


def drawn(count: int, pace: Pace) -> list[float]:
    """Times between failures without memory, behind the way back: the job is never hit while it comes back."""
    import numpy as np

    gaps = np.random.default_rng(4).exponential(MEAN_S, count)
    return (gaps + pace.outage_s).tolist()


def start(root: Path) -> "BaseProcess":
    from cairn.labs.ranks import process_context

    arguments = (root, ENDLESS, EVERY, PAUSE_S)
    process = process_context(train).Process(target=train, args=arguments, daemon=True)
    process.start()
    return process


def paced(root: Path) -> Pace:
    """Steps inside an interval, over a checkpoint, and from the start of a process to its first step."""
    for number in range(2):  # the first process also pays for what is read from disk once
        at = root / str(number)
        began = time.perf_counter()
        process = start(at)
        seen = [_when(at, step) for step in (1, EVERY - 1, EVERY, 2 * EVERY - 1, 2 * EVERY)]
        process.kill()
        process.join(PATIENCE_S)
        first, inside, written, _, again = seen
        step_s = (inside - first) / (EVERY - 2)
        write_s = max((again - written) - EVERY * step_s, 1e-4)
    return Pace(step_s, write_s, first - began - step_s)


def _when(root: Path, step: int) -> float:
    """When the run wrote that step, or a later one."""
    deadline = time.perf_counter() + PATIENCE_S
    while step_of(root) < step:
        if time.perf_counter() > deadline:
            raise TimeoutError(f"step {step} did not come within {PATIENCE_S:g} s")
        time.sleep(0.0005)
    return time.perf_counter()


def lived(root: Path, gaps: list[float]) -> Life:
    """One process after another in the same folder; each is killed when its time is up."""
    up = []
    for gap in gaps:
        began = time.perf_counter()
        process = start(root)
        time.sleep(gap)
        process.kill()  # SIGKILL: no exit handler, no flush
        process.join(PATIENCE_S)
        up.append(time.perf_counter() - began)
    from cairn.labs.cluster._trainee import resume

    return Life(up, resume(root, []).step)


def expected_steps(up_s: list[float], pace: Pace) -> float:
    """What the accounting of the large jobs says about these very failures."""
    import numpy as np

    from cairn.cluster.reliability import Scheme
    from cairn.cluster.reliability_monte_carlo import accounted

    scheme = Scheme(
        name="kill", about="kill -9", write=pace.write_s, detect=0.0, restart=pace.outage_s
    )
    interval = EVERY * pace.step_s
    productive = accounted(np.array(up_s), scheme, interval)[0]
    return float(productive.sum()) / pace.step_s


def _steps(foreseen: float, kept: int) -> Check:
    return Check(
        what=Words("steps that were kept through all kills", "历次被杀后保住的步数"),
        predicted=foreseen,
        measured=kept,
        unit="steps",
        within=0.3,
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
