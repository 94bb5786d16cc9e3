"""What does the optimizer's step move? Seven numbers for each parameter: weight, gradient and two states.

    AdamW in float32:  read w, g, m, v   write w, m, v    =  28 bytes per parameter, a dozen FLOPs: memory decides

Written with torch's operations one after another the same update passes over memory many times. The bytes of that are
counted while it runs; the fused form is torch's on a CPU and our kernel on a GPU. All forms must agree.
"""

from typing import Any

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

LR, DECAY = 1e-3, 0.1


def run(bench: Workbench) -> Outcome:
    import torch

    from cairn.kernels.optim.adamw import State, cost
    from cairn.labs.gpu._traffic import Traffic

    count = (1 << 26) if bench.on_gpu else bench.setting("n", bench.pick(1 << 22, 1 << 20))
    state = State(*([torch.randn(count, device=bench.device).abs_()] for _ in range(4)))
    least = cost(count, 4, 4, 4, masters=False).bytes
    spare = [torch.empty(count, device=bench.device) for _ in range(2)]
    with Traffic() as traffic:
        _plain(state, *spare)
    with one_thread():
        bench.step("operations one after another")
        slow = bench.time(lambda: _plain(state, *spare), budget_ms=800).p10_s
        bench.step("fused")
        fast = bench.time(lambda: _fused(state), budget_ms=400).p10_s
    bench.step("three forms of one update")
    return Outcome(
        checks=[*_speeds(least / count, slow / fast, traffic.bytes / least), *_results()],
        table=Table(
            columns=[
                Words("form", "形式"),
                Words("bytes per parameter", "每参数字节"),
                Words("ms", "ms"),
                Words("GB/s", "GB/s"),
            ],
            rows=[
                ["plain", traffic.bytes / count, slow * 1e3, traffic.bytes / slow / 1e9],
                ["fused", least / count, fast * 1e3, least / fast / 1e9],
            ],
        ),
    )


def _speeds(bytes_each: float, ratio: float, by_bytes: float) -> list[Check]:
    return [
        Check(
            what=Words("bytes per parameter of the fused form", "融合形式每参数字节"),
            predicted=28.0,
            measured=bytes_each,
            unit="B",
        ),
        Check(
            what=Words("plain over fused, time", "未融合与融合的耗时比"),
            predicted=1.3,
            measured=ratio,
            unit="x",
            kind="at_least",
        ),
        Check(
            what=Words("and no more than the ratio of bytes", "且不超过字节之比"),
            predicted=by_bytes,
            measured=ratio,
            unit="x",
            kind="at_most",
            within=0.35,
        ),
    ]


def _results() -> list[Check]:
    return [
        Check(
            what=Words("largest disagreement of the three forms", "三种形式的最大差异"),
            predicted=1e-6,
            measured=_disagreement(),
            unit="",
            kind="at_most",
        ),
        Check(
            what=Words("length of clipped gradients, limit 1", "裁剪后梯度的长度，上限 1"),
            predicted=1.0,
            measured=_clip_checks(),
            unit="",
            within=1e-4,
        ),
    ]


def _plain(state: Any, part: Any, root: Any) -> None:
    """m, v, then the weights, one operation after another.

    What lies between goes into two spare tensors: new ones would measure the page faults of the operating system.
    """
    import torch

    [w], [g], [m], [v] = state.weights, state.grads, state.m, state.v
    m.mul_(0.9).add_(torch.mul(g, 0.1, out=part))
    v.mul_(0.95).add_(torch.mul(g, g, out=part).mul_(0.05))
    torch.sqrt(v, out=root).add_(1e-8)
    w.mul_(1 - LR * DECAY).sub_(torch.div(m, root, out=part).mul_(LR))


def _fused(state: Any) -> None:
    import torch

    from cairn.kernels.optim.adamw import Step, adamw

    if state.weights[0].is_cuda:
        adamw(state, Step(1, LR, weight_decay=DECAY))
        return
    fused: Any = torch._fused_adamw_
    fused(
        list(state.weights),
        list(state.grads),
        list(state.m),
        list(state.v),
        [],
        [torch.tensor(1.0)],
        lr=LR,
        beta1=0.9,
        beta2=0.95,
        weight_decay=DECAY,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )


def _disagreement() -> float:
    """Our reference, our optimizer class and torch's AdamW after three steps on one small problem."""
    import torch
    from torch import nn

    from cairn.kernels.optim.adamw import State, Step, adamw_reference
    from cairn.train.config import Optim
    from cairn.train.optim.adamw import AdamW

    generator = torch.Generator().manual_seed(0)
    start = torch.randn(8, 8, generator=generator)
    gradients = [torch.randn(8, 8, generator=generator) for _ in range(3)]
    by_hand = State([start.clone()], [start.clone()], [torch.zeros(8, 8)], [torch.zeros(8, 8)])
    ours = nn.Parameter(start.clone())
    optimizer = AdamW({"w": ours}, Optim(lr=LR, weight_decay=DECAY), masters=False)
    theirs = nn.Parameter(start.clone())
    torchs = torch.optim.AdamW([theirs], lr=LR, betas=(0.9, 0.95), weight_decay=DECAY)
    for number, gradient in enumerate(gradients, start=1):
        adamw_reference(by_hand._replace(grads=[gradient]), Step(number, LR, weight_decay=DECAY))
        optimizer.update({"w": gradient}, number, LR, torch.ones(()))
        theirs.grad = gradient.clone()
        torchs.step()
    results = [by_hand.weights[0], ours.detach(), theirs.detach()]
    return max(float((a - b).abs().max()) for a in results for b in results)


def _clip_checks() -> float:
    """The length of gradients after our factor: the limit, where they were longer."""
    import torch

    from cairn.train.step import clip_factor

    gradients = [torch.randn(50, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
    factor = clip_factor(norm, 1.0)
    return float(torch.stack([(g * factor).square().sum() for g in gradients]).sum().sqrt())


LAB = described(__file__, run)
