"""What does a token cost in joules? Watts times seconds, and seconds follow from bytes and FLOPs.

    a product     watts / (FLOP/s)  = J per FLOP       H200, planned: 0.9 pJ
    memory        watts / (byte/s)  = J per byte       H200, planned: 140 pJ: a byte costs as much as 160 FLOP

The planner's energy per token must lie above what the bytes and FLOPs of a step cannot avoid, and must fall when the
same GPUs serve more requests. On a GPU the card's own energy counter is read while it multiplies and while it copies.
"""

import time
from collections.abc import Callable
from typing import Any

from cairn.labs.lab import Check, Lab, Outcome, Question, Rows, Table, Words
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
    from cairn.plan.serve_plan import Asked, plan

    asked = Asked(rate=rate, input_tokens=INPUT, output_tokens=OUTPUT, slo_ttft=5.0, slo_tpot=0.5)
    planned = plan(Served(spec=spec, device=gpu), asked, 1)
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

    known = next((name for name in KNOWN if name in bench.ceilings.device_name.lower()), None)
    if known is None:
        return []
    watts = device(known).watts
    product = make_product(bench.device, "bf16", 8192)
    source, target = (torch.empty(1 << 30, dtype=torch.int8, device=bench.device) for _ in range(2))
    found = []
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
            found.append(
                Check(
                    what=Words(what, zh),
                    predicted=watts / rate * 1e12,
                    measured=joules / work * 1e12,
                    unit="pJ",
                    within=0.45,
                )
            )
    return found


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


LAB = Lab(
    name="energy",
    area="gpu",
    title=Words("Joules per token", "每个 token 的焦耳数"),
    hypothesis=Words(
        "Energy is power times time: a byte from memory costs as much as a hundred or more FLOPs, no plan "
        "goes below the energy of its FLOPs, and serving more requests with the same GPUs cuts the joules "
        "per token.",
        "能耗等于功率乘时间：从显存读一字节的能量抵得上一百多次 FLOP；任何方案都不会低于其 FLOP 的能量；"
        "同样的 GPU 服务更多请求，每 token 焦耳更低。",
    ),
    run=run,
    causes=(
        Words(
            "a power limit or clocks other than those of the datasheet",
            "功耗上限或频率与规格书不同",
        ),
        Words(
            "the share of power that an idle GPU draws is not the quarter that the planner assumes",
            "空闲 GPU 的功耗占比不是规划器假设的四分之一",
        ),
    ),
    code=(
        "cairn/plan/device.py:device",
        "cairn/plan/serve_plan.py:plan",
        "cairn/hw/nvml.py:open_nvml",
    ),
    reading=(
        "Computing's Energy Problem (and what we can do about it) (2014)",
        "The ML.ENERGY Benchmark: Toward Automated Inference Energy Measurement and Optimization (2025)",
    ),
    questions=(
        Question(
            Words("Where does the energy of decoding go?", "解码的能量花在哪里？"),
            Words(
                "Into moving weights and keys: 16 GB of an 8B model in bf16 at about 140 pJ per byte is 2.3 "
                "J per step at batch 1, while its 16 GFLOP cost 0.014 J. Sharing the step over 64 sequences "
                "divides the first.",
                "花在搬运权重和 KV：8B 模型 bf16 的 16 GB 按约 140 pJ/字节是每步 2.3 J（batch 1），而 16 "
                "GFLOP 只要 0.014 J。64 个序列分摊就除以 64。",
            ),
        ),
        Question(
            Words("Which three levers lower joules per token?", "降低每 token 能耗的三个手段？"),
            Words(
                "Fewer bytes per token (batching, quantisation, prefix reuse), fewer idle seconds (higher "
                "load, consolidation), lower clocks where memory is the limit (power capping costs little "
                "there).",
                "每 token 更少字节（批处理、量化、前缀复用）；更少空闲（提高负载、合并）；"
                "访存受限时降频（限功率几乎不损性能）。",
            ),
        ),
        Question(
            Words(
                "Why is FLOP/s per watt a poor measure of a serving fleet?",
                "为什么用每瓦 FLOP/s 衡量推理集群不合适？",
            ),
            Words(
                "Decode is bound by memory and by load, so few of those FLOPs are used: count useful tokens "
                "within the SLO per joule, idle GPUs included.",
                "解码受访存和负载限制，FLOP 用不满；应统计满足 SLO 的有效 token 每焦耳，并把空闲 GPU 算进去。",
            ),
        ),
    ),
    seconds=4.0,
)
