"""What does keeping optimizer states on the host save, and what does every step pay for it?

    on the device    weights, gradients, states 8 B, masters         the update reads and writes them where they are
    offloaded        weights and gradients only                      gradients go down, weights come up: 8 B each

The trainer's own optimizer runs both ways on the same gradients: the weights must be the same, and the time of the
step is compared with what the moved bytes cost at this machine's copy rate.
"""

from typing import Any

from cairn.labs.lab import Check, Outcome, Table, Words, described
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

    count = bench.setting("n", bench.pick(2 << 20, 1 << 20)) if not bench.on_gpu else 64 << 20
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
        seconds[name] = bench.time(step, budget_ms=800).p10_s
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


LAB = described(__file__, run)
