"""What does keeping optimizer states on the host save, and what does every step pay for it?

    on the device    weights, gradients, states 8 B, masters         the update reads and writes them where they are
    offloaded        weights and gradients only                      gradients go down, weights come up: 8 B each

The trainer's own optimizer runs both ways on the same gradients: the weights must be the same, and the time of the
step is compared with what the moved bytes cost at this machine's copy rate.
"""

from typing import Any

from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench


def made(bench: Workbench, count: int, offload: bool) -> tuple[Any, Any, Any]:
    """Parameters, their optimizer, and gradients."""
    import torch
    from torch import nn

    from cairn.train.config import Optim
    from cairn.train.optim.optimizer import make_optimizer

    generator = torch.Generator().manual_seed(0)
    parameters = {
        f"layer.{n}.weight": nn.Parameter(
            torch.randn(count // 4 // 256, 256, generator=generator).to(bench.device)
        )
        for n in range(4)
    }
    gradients = {
        name: torch.randn(p.shape, generator=generator).to(bench.device)
        for name, p in parameters.items()
    }
    optimizer = make_optimizer(parameters, Optim(offload=offload), False, 0, lambda tensors: {})
    return parameters, optimizer, gradients


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    count = bench.pick(2 << 20, 1 << 20) if not bench.on_gpu else 64 << 20
    factor = torch.ones((), device=bench.device)
    weights, seconds, resident = {}, {}, {}
    for offload in (False, True):
        name = "offloaded" if offload else "on the device"
        bench.step(f"{name}: {count / 1e6:.0f} million parameters")
        parameters, optimizer, gradients = made(bench, count, offload)
        for number in range(1, 4):
            optimizer.update(gradients, number, 1e-3, factor)
        weights[name] = {key: p.detach().cpu().clone() for key, p in parameters.items()}
        states = [t for role in optimizer.tensors().values() for t in role.values()]
        home = [] if offload else states
        resident[name] = sum(t.nbytes for t in home) / count
        step = lambda o=optimizer, g=gradients: o.update(g, 4, 1e-3, factor)  # noqa: E731
        seconds[name] = bench.time(step, budget_ms=1200).p10_s
    apart = max(
        float((weights["on the device"][key] - other).abs().max())
        for key, other in weights["offloaded"].items()
    )
    moved = 8.0 * count
    extra = seconds["offloaded"] - seconds["on the device"]
    return Outcome(
        checks=_checks(bench, apart, resident, seconds),
        table=Table(
            columns=[
                Words("form", "形式"),
                Words("state bytes for each parameter", "每参数状态字节（设备）"),
                Words("ms a step", "每步 ms"),
            ],
            rows=[[name, resident[name], seconds[name] * 1e3] for name in seconds],
        ),
        notes=[
            Words(
                f"{moved / 1e6:.0f} MB move in every step; they cost {extra * 1e3:.1f} ms here, "
                f"{moved / max(extra, 1e-9) / 1e9:.1f} GB/s",
                f"每步搬运 {moved / 1e6:.0f} MB，在本机多花 {extra * 1e3:.1f} ms，约 "
                f"{moved / max(extra, 1e-9) / 1e9:.1f} GB/s",
            )
        ],
    )


def _checks(
    bench: Workbench, apart: float, resident: dict[str, float], seconds: dict[str, float]
) -> list[Check]:
    return [
        Check(
            what=Words("largest difference of a weight", "权重的最大差异"),
            predicted=1e-6 if bench.on_gpu else 0.0,  # two kernels there, one here
            measured=apart,
            unit="",
            kind="at_most",
        ),
        Check(
            what=Words("state bytes for each parameter on the device", "设备上每参数状态字节"),
            predicted=8.0,
            measured=resident["on the device"] - resident["offloaded"],
            unit="B",
            within=0.01,
        ),
        Check(
            what=Words("step offloaded over on the device", "offload 与设备内更新的耗时比"),
            predicted=1.0,
            measured=seconds["offloaded"] / seconds["on the device"],
            unit="x",
            kind="at_least",
            within=0.1,
        ),
    ]


LAB = Lab(
    name="offload",
    area="training",
    title=Words("Optimizer states on the host", "把优化器状态放到主机内存"),
    hypothesis=Words(
        "Offloading frees 8 bytes for each parameter on the device and leaves the weights as "
        "they would be; every step pays for 8 "
        "bytes a parameter that travel.",
        "offload 为设备每参数省下 8 字节，且权重不变；代价是每步每参数要搬运 8 字节。",
    ),
    run=run,
    causes=(
        Words(
            "on a CPU host and device are the same memory: only the copies show, not the bus",
            "CPU 上主机与设备是同一内存：只体现拷贝，不体现总线",
        ),
        Words(
            "the update itself is bound by memory, so a busy neighbour moves both numbers",
            "更新本身受内存带宽限制，邻居繁忙会同时影响两者",
        ),
    ),
    code=(
        "cairn/train/optim/optimizer.py:Offloaded",
        "cairn/train/optim/adamw.py:AdamW",
        "cairn/train/memory.py:predict",
    ),
    reading=(
        "ZeRO-Offload: Democratizing Billion-Scale Model Training (2021)",
        "ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning (2021)",
    ),
    questions=(
        Question(
            Words(
                "8B parameters over PCIe 5 (50 GB/s): what does offloading cost a step?",
                "8B 参数、PCIe 5（50 GB/s）时 offload 每步多花多少？",
            ),
            Words(
                "bf16 gradients down and bf16 weights up: 32 GB, 0.64 s, plus the CPU's update "
                "over about 100 GB of memory "
                "traffic. It pays only where a step takes many seconds, by accumulation.",
                "bf16 梯度下行、权重上行共 32 GB，约 0.64 s，再加 CPU 更新约 100 GB 访存；只有单"
                "步很长（大累积）时才划算。",
            ),
        ),
        Question(
            Words(
                "Why offload states and not activations first?", "为什么先 offload 状态而不是激活？"
            ),
            Words(
                "States are touched once a step, activations once a microbatch and layer; "
                "bytes per use decide. Activations "
                "are better recomputed.",
                "状态每步只用一次，激活每层每 microbatch 都要用；按单位使用的字节看，激活更适合重计算。",
            ),
        ),
        Question(
            Words("What can hide the transfer?", "传输怎么掩盖？"),
            Words(
                "Gradients leave bucket by bucket during backward, and the update of a layer can run while others are "
                "still walked; one-step-late updates hide the rest at the price of stale weights.",
                "梯度在反向中逐桶下传，某层的更新可与其他层的反向并行；延迟一步更新能掩盖剩余部分，但权重会滞后。",
            ),
        ),
    ),
    seconds=5.0,
)
