"""What does each ZeRO stage take off a rank's memory? Predicted in bytes per parameter, counted on real ranks.

    float32, AdamW     weights 4   gradients 4   states 8   = 16 bytes for each parameter
    dp                 4           4             8
    zero 1             4           4             8 / n
    zero 2             4           4 / n         8 / n
    fsdp (zero 3)      4 / n       4 / n         8 / n

Two ranks make one step in each form and count the bytes they hold, gradients when backward has ended. The result of the
step is the same.
"""

from typing import Any

from cairn.labs.lab import Check, Lab, Outcome, Question, Rows, Table, Words
from cairn.labs.one_thread import one_thread
from cairn.labs.ranks import run_ranks
from cairn.labs.training._spread import Setting, alone, difference, spread, tiny, train
from cairn.labs.workbench import Workbench
from cairn.train.parallel.layout import Layout, Options

RANKS = 2
FORMS = {
    "dp": (Layout(dp=RANKS), Options()),
    "zero 1": (Layout(dp=RANKS), Options(zero=1)),
    "zero 2": (Layout(dp=RANKS), Options(zero=2)),
    "fsdp": (Layout(fsdp=RANKS), Options()),
}
# Shares of weights, gradients and states that a rank keeps, for n ranks.
KEPT = {"dp": (0, 0, 0), "zero 1": (0, 0, 1), "zero 2": (0, 1, 1), "fsdp": (1, 1, 1)}


def held(
    rank: int, count: int, settings: dict[str, Setting]
) -> dict[str, tuple[int, int, int, Any]]:
    """Bytes of weights, gradients and states by form, and the trace of its steps."""
    found = {}
    for name, setting in settings.items():
        parallel = spread(setting)
        gradients = _watch_gradients(parallel)
        trace = train(parallel, setting)
        weights = sum(_bytes(p) for stage in parallel.stages for p in stage.parameters())
        found[name] = (weights, gradients[0], _states(parallel), trace)
    return found


def _watch_gradients(parallel: Any) -> list[int]:
    """Bytes of gradients when backward has ended and before their sums are used; filled while a step runs."""
    from cairn.train.parallel.data import Replicas
    from cairn.train.parallel.zero import Zero

    (sync,) = parallel.syncs
    finish, seen = sync.finish, []

    def spy() -> None:
        if isinstance(sync, Zero):  # on their way whole (stage 1), or this rank's rows (stage 2)
            kept = [flat for _, flat, _, _ in sync._flying] + list(sync.shards.values())
        else:
            held = sync.held.found() if isinstance(sync, Replicas) else sync.gradients()
            kept = list(held.values())
        seen.append(sum(map(_bytes, kept)))
        finish()

    sync.finish = spy
    return seen


def _states(parallel: Any) -> int:
    from cairn.train.config import Optim
    from cairn.train.optim.optimizer import make_optimizer

    optimizer = make_optimizer(parallel.parameters(), Optim(), False, 0, lambda tensors: {})
    return sum(_bytes(tensor) for role in optimizer.tensors().values() for tensor in role.values())


def _bytes(tensor: Any) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


@one_thread()
def run(bench: Workbench) -> Outcome:
    spec = tiny(hidden=64, intermediate=128, layers=bench.pick(4, 2))
    settings = {
        name: Setting(spec, layout, options, steps=1, per_step=2)
        for name, (layout, options) in FORMS.items()
    }
    bench.step("one process")
    expected = alone(settings["dp"])
    bench.step(f"{RANKS} ranks: dp, zero 1, zero 2, fsdp")
    ranks = run_ranks(RANKS, held, settings)
    count = spec.parameters()
    rows, checks = [], []
    for name in FORMS:
        measured = [max(rank[name][part] for rank in ranks) for part in range(3)]
        kept = [1 / RANKS if cut else 1.0 for cut in KEPT[name]]
        predicted = [count * width * share for width, share in zip((4, 4, 8), kept, strict=True)]
        rows.append(
            [name, *[m / count for m in measured], sum(predicted) / count, sum(measured) / count]
        )
        checks.append(
            Check(
                what=Words(f"{name}: bytes for each parameter", f"{name}：每参数字节数"),
                predicted=sum(predicted) / count,
                measured=sum(measured) / count,
                unit="B",
                within=0.03,  # rows that do not divide evenly
            )
        )
    apart = max(difference([rank[name][3] for rank in ranks], expected) for name in FORMS)
    return Outcome(
        checks=[
            *checks,
            Check(
                what=Words("largest difference of any form", "各形式结果的最大差异"),
                predicted=1e-5,
                measured=apart,
                unit="",
                kind="at_most",
            ),
        ],
        table=_table(rows),
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("form", "形式"),
            Words("weights B/parameter", "权重 B/参数"),
            Words("gradients", "梯度"),
            Words("states", "优化器状态"),
            Words("predicted", "预测合计"),
            Words("counted", "实测合计"),
        ],
        rows=rows,
    )


LAB = Lab(
    name="zero-memory",
    area="training",
    title=Words("What ZeRO takes off a rank", "ZeRO 为每个 rank 省下什么"),
    hypothesis=Words(
        "On two ranks AdamW in float32 needs 16 bytes for each parameter with data parallel, 12 with ZeRO-1, 10 with "
        "ZeRO-2 and 8 with FSDP, for the same gradients and weights.",
        "两个 rank、float32 AdamW 时，每参数字节数：数据并行 16，ZeRO-1 为 12，ZeRO-2 为 10，"
        "FSDP 为 8，且梯度与权重结果相同。",
    ),
    run=run,
    causes=(
        Words(
            "parameters whose rows do not divide by the ranks are padded",
            "行数不能整除 rank 数的参数会有填充",
        ),
        Words(
            "buckets and gathered layers that exist only during a step are not counted here",
            "只在一步内存在的桶和聚合层未计入",
        ),
    ),
    code=(
        "cairn/train/parallel/zero.py:Zero",
        "cairn/train/parallel/fsdp.py:Fsdp",
        "cairn/train/memory.py:predict",
        "cairn/plan/train_memory.py:rank_memory",
    ),
    reading=(
        "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (2020)",
        "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel (2023)",
    ),
    questions=(
        Question(
            Words(
                "How many bytes per parameter does mixed-precision AdamW need, and how are they cut?",
                "混合精度 AdamW 每参数需要多少字节，各级如何切分？",
            ),
            Words(
                "16: bf16 weights 2, bf16 gradients 2, float32 master 4, two float32 moments "
                "8. ZeRO-1 cuts 12 of them, "
                "ZeRO-2 14, ZeRO-3 all 16.",
                "16：bf16 权重 2、梯度 2、fp32 主权重 4、两个 fp32 动量 8。ZeRO-1 切 12，"
                "ZeRO-2 切 14，ZeRO-3 全部 16。",
            ),
        ),
        Question(
            Words("What does ZeRO not reduce?", "ZeRO 不能减少什么？"),
            Words(
                "Activations: they depend on a rank's own tokens. Recomputation, sequence or "
                "context parallel and smaller "
                "micro-batches do.",
                "激活：它取决于本 rank 的 token 数；要靠重计算、序列/上下文并行或更小的 micro-batch。",
            ),
        ),
        Question(
            Words("When is ZeRO-1 better than FSDP?", "什么时候 ZeRO-1 比 FSDP 更好？"),
            Words(
                "When weights and gradients fit: it moves as many bytes as data parallel and "
                "gathers once a step, while "
                "FSDP gathers every layer twice for each micro-batch and needs compute long enough to hide it.",
                "权重和梯度放得下时：ZeRO-1 通信量与数据并行相同、每步只聚合一次；FSDP 每个 "
                "micro-batch 每层聚合两次，需要足够长的计算来掩盖。",
            ),
        ),
    ),
    needs=("2 processes",),
    seconds=5.0,
)
