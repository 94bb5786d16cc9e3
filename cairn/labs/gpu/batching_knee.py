"""Up to which batch are more sequences free? Until the weights are no longer what a step waits for.

    step of B sequences:  max(weight bytes / bandwidth, 2 B weights / rate)     knee  B* = ridge x bytes per weight / 2

First with the cost model of a real model on a datasheet's GPU: the knee that it shows beside the formula. Then a
matrix with so many rows here: time per row falls until the knee, then stays.
"""

from cairn.hw.datasheet import CHIPS
from cairn.hw.roofline import floor
from cairn.kernels.kernel import Cost
from cairn.labs.lab import Check, Outcome, Plot, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

GPU = "H200 SXM"
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def knee(flops_per_s: float, bytes_per_s: float, weight_bytes: float) -> float:
    """Sequences at which reading the weights and multiplying with them take equally long."""
    return flops_per_s / bytes_per_s * weight_bytes / 2


def run(bench: Workbench) -> Outcome:
    bench.step("the cost model of a real model")
    chip = next(chip for chip in CHIPS if chip.name == GPU)
    predicted = knee(chip.flops_per_s["bf16"], chip.bytes_per_s, 2)
    shown = _knee_of_model()
    bench.step("a matrix and more and more rows")
    seconds, floors = _products(bench)
    first, last = min(seconds), max(seconds)
    per_row = {rows: s / rows for rows, s in seconds.items()}
    return Outcome(
        checks=[
            Check(
                what=Words(
                    f"knee of Qwen3-8B on an {GPU}, short contexts",
                    f"Qwen3-8B 在 {GPU} 上的拐点（短上下文）",
                ),
                predicted=predicted,
                measured=float(shown),
                unit="sequences",
                within=0.15,
            ),
            Check(
                what=Words(
                    f"time of a row in {last} over a row alone",
                    f"{last} 行一起时每行耗时与单独一行之比",
                ),
                predicted=0.75,  # 1 would mean that nothing is shared
                measured=per_row[last] / per_row[first],
                unit="x",
                kind="at_most",
            ),
            *(_flat(seconds) if bench.on_gpu else []),
        ],
        plots=[
            Plot(
                title=Words("Time per row", "每行耗时"),
                x=Words("rows", "行数"),
                y=Words("us per row", "每行 us"),
                lines={
                    "floor": [(float(r), floors[r] / r * 1e6) for r in seconds],
                    "measured": [(float(r), per_row[r] * 1e6) for r in seconds],
                },
                log_x=True,
                log_y=True,
            )
        ],
        notes=[_note(predicted)],
    )


def _note(predicted: float) -> Words:
    return Words(
        f"{GPU}: weights in bf16 are free to share up to {predicted:.0f} sequences a step.",
        f"{GPU}：bf16 权重下，每步约 {predicted:.0f} 个序列以内共享权重是免费的。",
    )


def _flat(seconds: dict[int, float]) -> list[Check]:
    return [
        Check(
            what=Words(
                "16 rows over one: still the same weights", "16 行与 1 行的耗时比：读的是同样的权重"
            ),
            predicted=1.0,
            measured=seconds[16] / seconds[1],
            unit="x",
            within=0.4,
        )
    ]


def _knee_of_model() -> int:
    """The smallest batch of decoding sequences whose products take longer than the weights."""
    from cairn.models.presets import preset
    from cairn.models.step_cost import SequenceWork, step_cost

    spec = preset("qwen3-8b")
    chip = next(chip for chip in CHIPS if chip.name == GPU)

    def bound(sequences: int) -> str:
        cost: Cost = step_cost(spec, [SequenceWork(1, 1)] * sequences, 2)
        return floor(cost.flops, cost.bytes, "bf16", None, datasheet=chip).bound

    low, high = 1, 4096
    while low < high:  # the bound turns once, so halving finds it
        middle = (low + high) // 2
        low, high = (low, middle) if bound(middle) == "compute" else (middle + 1, high)
    return low


def _products(bench: Workbench) -> tuple[dict[int, float], dict[int, float]]:
    import torch

    columns = 8192 if bench.on_gpu else bench.setting("columns", bench.pick(4096, 2048))
    dtype, name = (torch.bfloat16, "bf16") if bench.on_gpu else (torch.float32, "fp32")
    w = torch.randn(columns, columns, device=bench.device, dtype=dtype)
    counts = ROWS if bench.on_gpu else bench.pick((1, 4, 16, 64), (1, 16, 64))
    seconds, floors = {}, {}
    with one_thread():
        for rows in counts:
            x = torch.randn(rows, columns, device=bench.device, dtype=dtype)
            product = lambda x=x: x @ w.T  # noqa: E731
            seconds[rows] = bench.time(product, budget_ms=300, at_least=3).p10_s
            flops, moved = (
                2.0 * rows * columns**2,
                (columns**2 + 2.0 * rows * columns) * dtype.itemsize,
            )
            floors[rows] = floor(flops, moved, name, bench.ceilings, in_graph=False).seconds
    return seconds, floors


LAB = described(__file__, run)
