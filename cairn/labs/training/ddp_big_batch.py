"""Are two ranks with half a batch each the same as one with all of it? To the last rounding, if sums are taken right.

    gradient of the batch = sum over ranks of (sum over their tokens) / (tokens of all ranks)

Samples have different numbers of tokens with a loss, so the mean of the ranks' means is another gradient. Both are
computed here: the trainer's, over real ranks, and the naive one.
"""

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.ranks import run_ranks
from cairn.labs.training._spread import (
    SEED,
    Setting,
    Trace,
    alone,
    batches,
    difference,
    on_ranks,
    tiny,
)
from cairn.labs.workbench import Workbench
from cairn.train.parallel.layout import Layout

TOLERANCE = 1e-5  # float32: sums in another order


@one_thread()
def run(bench: Workbench) -> Outcome:
    setting = Setting(
        tiny(), Layout(dp=2), steps=bench.setting("steps", bench.pick(3, 2)), per_step=4, tokens=32
    )
    bench.step("one process, the whole batch")
    expected = alone(setting)
    bench.step("two ranks, half of it each")
    traces = run_ranks(2, on_ranks, setting)
    apart = difference(traces, expected)
    bench.step("the mean of means, for comparison")
    naive = _naive_loss(setting)
    return Outcome(
        checks=[
            Check(
                what=Words("largest difference to one process", "与单进程的最大差异"),
                predicted=TOLERANCE,
                measured=apart,
                unit="",
                kind="at_most",
            ),
            Check(
                what=Words("error of averaging the ranks' means", "对各 rank 均值再取平均的误差"),
                predicted=100 * TOLERANCE,
                measured=abs(naive - expected["losses"][0]),
                unit="loss",
                kind="at_least",
            ),
        ],
        table=Table(
            columns=[
                Words("step", "步"),
                Words("loss, one process", "单进程 loss"),
                Words("loss, two ranks", "两个 rank 的 loss"),
                Words("norm, one process", "单进程梯度范数"),
                Words("norm, two ranks", "两个 rank 的梯度范数"),
            ],
            rows=[
                [
                    step,
                    expected["losses"][step],
                    traces[0]["losses"][step],
                    expected["norms"][step],
                    traces[0]["norms"][step],
                ]
                for step in range(setting.steps)
            ],
        ),
        notes=[_note(expected, naive)],
    )


def _note(expected: Trace, naive: float) -> Words:
    return Words(
        f"first loss {expected['losses'][0]:.6f}; averaged over ranks {naive:.6f}",
        f"第一步 loss {expected['losses'][0]:.6f}；按 rank 平均为 {naive:.6f}",
    )


def _naive_loss(setting: Setting) -> float:
    """The mean over samples of each sample's own mean: what a careless trainer would report and descend."""
    import torch

    from cairn.train.objective import Objective
    from cairn.train.parallel.mesh import Mesh
    from cairn.train.parallel.parallelize import parallelize

    parallel, loss = (
        parallelize(setting.spec, Mesh.alone(), seed=SEED),
        Objective(setting.spec),
    )
    means = [
        float(parallel.forward_backward([one], loss, torch.tensor(float(one.valid()))))
        for one in batches(setting, 0)
    ]
    return sum(means) / len(means)


LAB = described(__file__, run)
