"""Are two ranks with half a batch each the same as one with all of it? To the last rounding, if sums are taken right.

    gradient of the batch = sum over ranks of (sum over their tokens) / (tokens of all ranks)

Samples have different numbers of tokens with a loss, so the mean of the ranks' means is another gradient. Both are
computed here: the trainer's, over real ranks, and the naive one.
"""

from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
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
    setting = Setting(tiny(), Layout(dp=2), steps=bench.pick(3, 2), per_step=4, tokens=32)
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

    from cairn.models.build import Build
    from cairn.models.weights import random_model
    from cairn.train.loss import NextToken
    from cairn.train.parallel.alone import Alone

    parallel, loss = (
        Alone(random_model(setting.spec, Build("cpu", torch.float32), SEED)),
        NextToken(setting.spec),
    )
    means = [
        float(parallel.forward_backward([one], loss, torch.tensor(float(one.valid()))))
        for one in batches(setting, 0)
    ]
    return sum(means) / len(means)


LAB = Lab(
    name="ddp-big-batch",
    area="training",
    title=Words("Data parallel is a big batch", "数据并行等价于大 batch"),
    hypothesis=Words(
        "Two ranks with half of the samples each give the losses, gradients and weights of one "
        "process with all of them, "
        "within float32 rounding; averaging means over samples of uneven length does not.",
        "两个 rank 各算一半样本，得到的 loss、梯度和权重与单进程算全部样本一致（仅浮点舍入差异）"
        "；而对长短不一的样本取均值再平均则不一致。",
    ),
    run=run,
    causes=(
        Words(
            "sums in another order: float32 addition is not associative",
            "加法顺序不同：float32 加法不满足结合律",
        ),
        Words(
            "a layer that looks at the whole batch (batch norm) would see only its rank's part",
            "依赖整个 batch 的层（如 BatchNorm）只看到本 rank 的部分",
        ),
    ),
    code=(
        "cairn/train/parallel/data.py:Replicas",
        "cairn/train/parallel/wrap.py:parallelize",
        "cairn/train/step.py:train_step",
    ),
    reading=(
        "PyTorch Distributed: Experiences on Accelerating Data Parallel Training (2020)",
        "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour (2017)",
    ),
    questions=(
        Question(
            Words(
                "Why divide by the tokens of all ranks and not average gradients?",
                "为什么要除以所有 rank 的 token 数，而不是对梯度取平均？",
            ),
            Words(
                "With padding or masks each rank has another number of tokens: an average of means weighs a token of a "
                "short rank more. Sum losses, sum counts, divide once.",
                "有 padding 或 mask 时各 rank 的有效 token 数不同，均值再平均会放大 token 少的 "
                "rank 的权重；应先求和再统一除一次。",
            ),
        ),
        Question(
            Words(
                "Where in the step does the all-reduce belong?", "all-reduce 应放在一步中的哪里？"
            ),
            Words(
                "During the last micro-batch's backward, bucket by bucket, and before "
                "clipping: the norm must be that of "
                "the summed gradient.",
                "在最后一个 micro-batch 的反向过程中按桶发起，并且在梯度裁剪之前：范数必须是汇总后梯度的范数。",
            ),
        ),
        Question(
            Words(
                "How does doubling dp change what the optimizer sees?",
                "dp 翻倍后优化器看到的有何变化？",
            ),
            Words(
                "If the global batch is kept, nothing. If each rank keeps its batch, the "
                "gradient has half the noise and "
                "there are half as many updates per sample, so the learning rate and warm-up need another look.",
                "全局 batch 不变则没有变化；若每卡 batch 不变，则梯度噪声减小、同样样本的更新次"
                "数减半，学习率和 warmup 要重新考虑。",
            ),
        ),
    ),
    needs=("2 processes",),
    seconds=4.0,
)
