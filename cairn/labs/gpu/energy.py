"""What does a token cost in joules? Watts times seconds, and seconds follow from bytes and FLOPs.

    a product     watts / (FLOP/s)  = J per FLOP       H200, planned: 0.9 pJ
    memory        watts / (byte/s)  = J per byte       H200, planned: 140 pJ: a byte costs as much as 160 FLOP

The planner's energy per token must lie above what the bytes and FLOPs of a step cannot avoid, and must fall when the
same GPUs serve more requests. On a GPU the card's own energy counter is read while it multiplies and while it copies.
"""

import time
from collections.abc import Callable
from typing import Any

from cairn.labs.lab import Check, Outcome, Rows, Table, Words, described
from cairn.labs.workbench import Workbench

INPUT, OUTPUT = 256, 64  # tokens of a request


def run(bench: Workbench) -> Outcome:
    from cairn.models.presets import preset
    from cairn.plan.device import KNOWN, device

    rows = []
    for name in KNOWN:
        gpu = device(name)
        rows.append(
            [
                name,
                gpu.watts,
                gpu.watts / gpu.flops_per_s * 1e12,
                gpu.watts / gpu.bytes_per_s * 1e12,
                gpu.flops_per_s / gpu.bytes_per_s,
            ]
        )
    bench.step("planning a server at two rates")
    spec, gpu = preset("qwen3-0.6b"), device("h200")
    rates = bench.pick((2.0, 20.0), (2.0, 10.0))
    slow, fast = (_joules(spec, gpu, rate) for rate in rates)
    floor_joules = _floor_joules(spec, gpu, rates[1])
    return Outcome(
        checks=[
            Check(
                what=Words(
                    "J per output token at the higher rate, above its floor",
                    "高负载下每输出 token 的能耗，不低于下限",
                ),
                predicted=floor_joules,
                measured=fast,
                unit="J",
                kind="at_least",
            ),
            Check(
                what=Words(
                    "higher rate over lower, J per token", "高负载与低负载的每 token 能耗比"
                ),
                predicted=0.6,
                measured=fast / slow,
                unit="x",
                kind="at_most",
            ),
            *(_measured(bench) if bench.on_gpu else []),
        ],
        table=_table(rows),
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("GPU", "GPU"),
            Words("watts when busy", "满载瓦数"),
            Words("pJ per FLOP (bf16)", "每 FLOP pJ（bf16）"),
            Words("pJ per byte", "每字节 pJ"),
            Words("FLOP for one byte's energy", "一字节能量可换的 FLOP"),
        ],
        rows=rows,
    )


def _joules(spec: Any, gpu: Any, rate: float) -> float:
    """Per output token, as the planner has it, from the real scheduler on this many requests a second."""
    from cairn.plan.serve_cost import Served
    from cairn.plan.serve_plan import Demand, plan

    demand = Demand(rate=rate, input_tokens=INPUT, output_tokens=OUTPUT, slo_ttft=5.0, slo_tpot=0.5)
    planned = plan(Served(spec=spec, device=gpu), demand, 1)
    return planned.options[0].joules_per_token


def _floor_joules(spec: Any, gpu: Any, rate: float) -> float:
    """What idling draws, over the tokens of a second, and the FLOPs of one token at the sustained rate."""
    from cairn.plan.serve_plan import WATTS_IDLE

    idle = WATTS_IDLE * gpu.watts / (rate * OUTPUT)
    return idle + (1 - WATTS_IDLE) * gpu.watts * spec.forward_flops(1, INPUT, 1) / gpu.flops_per_s


def _measured(bench: Workbench) -> list[Check]:
    """Joules per FLOP and per byte by the card's counter, beside the planner's watts and this machine's "
    "rates."""
    import torch

    from cairn.hw.measure_device import make_product
    from cairn.labs.gpu._ceiling import ceiling
    from cairn.plan.device import KNOWN, device

    gpu_name = next((name for name in KNOWN if name in bench.ceilings.device_name.lower()), None)
    if gpu_name is None:
        return []
    watts = device(gpu_name).watts
    product = make_product(bench.device, "bf16", 8192)
    source, target = (torch.empty(1 << 30, dtype=torch.int8, device=bench.device) for _ in range(2))
    checks = []
    for what, zh, call, work, rate in (
        (
            "pJ per FLOP of a product",
            "矩阵乘每 FLOP 的 pJ",
            product,
            2.0 * 8192**3,
            ceiling(bench.ceilings, "matmul.bf16"),
        ),
        (
            "pJ per byte of a copy",
            "拷贝每字节的 pJ",
            lambda: target.copy_(source),
            2.0 * 2**30,
            ceiling(bench.ceilings, "copy"),
        ),
    ):
        bench.step(what)
        joules = _counted(call, bench.pick(2.0, 1.0))
        if joules is not None:
            checks.append(
                Check(
                    what=Words(what, zh),
                    predicted=watts / rate * 1e12,
                    measured=joules / work * 1e12,
                    unit="pJ",
                    within=0.45,
                )
            )
    return checks


def _counted(call: Callable[[], object], seconds: float) -> float | None:
    """Joules of one call by NVML's energy counter; None where the card has none."""
    import torch

    from cairn.hw.nvml import NvmlMissing, open_nvml

    try:
        with open_nvml() as nvml:
            handle = nvml.ask("nvmlDeviceGetHandleByIndex", torch.cuda.current_device())
            before = nvml.ask("nvmlDeviceGetTotalEnergyConsumption", handle)
            calls, end = 0, time.perf_counter() + seconds
            while time.perf_counter() < end:
                for _ in range(10):
                    call()
                torch.cuda.synchronize()
                calls += 10
            after = nvml.ask("nvmlDeviceGetTotalEnergyConsumption", handle)
    except NvmlMissing:
        return None
    if before is None or after is None:
        return None
    return (after - before) / 1000 / calls


LAB = described(__file__, run)
