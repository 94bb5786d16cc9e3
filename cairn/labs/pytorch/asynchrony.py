"""Where does the host wait for the device without being told? At every number that Python wants to see.

    .item(), float(t), if t > 0, print(t), t.cpu()     ->  aten::_local_scalar_dense or a copy: the queue must drain

The waits are counted in the dispatcher, which needs no GPU: our training step must have none, a step as it is often
written has one for each number that it looks at. On a GPU the price is measured too.
"""

import math
import time
from typing import Any

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.pytorch._tiny_model import hidden, tiny_model, tokens_of
from cairn.labs.workbench import Workbench

READS = "aten::_local_scalar_dense"
STEPS = 3


def run(bench: Workbench) -> Outcome:
    bench.step("our training step")
    ours = _reads_of_ours(bench)
    bench.step("a step as it is often written")
    usual = _reads_of_usual()
    return Outcome(
        checks=[
            Check(
                what=Words("waits in a step of ours", "我们的训练步里的等待次数"),
                predicted=0.0,
                measured=ours / STEPS,
                unit="per step",
            ),
            Check(
                what=Words(
                    "waits in the usual step: if, float, item",
                    "常见写法里的等待次数：if、float、item",
                ),
                predicted=3.0,
                measured=usual / STEPS,
                unit="per step",
            ),
            *(_price(bench) if bench.on_gpu else []),
        ],
        table=Table(
            columns=[
                Words("what Python does", "Python 写法"),
                Words("waits for the device", "是否等待设备"),
            ],
            rows=[
                ["loss.item(), float(loss), int(n)", "yes"],
                ["if loss > 3:, while x.any():", "yes"],
                ["print(t), t.tolist(), t.cpu(), t.numpy()", "yes"],
                ["x[mask], torch.nonzero, torch.unique (sizes depend on data)", "yes"],
                [
                    "torch.where, clamp, masked_fill, t.to(device, non_blocking=True) from pinned",
                    "no",
                ],
            ],
        ),
    )


def _reads_of_ours(bench: Workbench) -> int:
    from cairn.labs.pytorch._watched import Watched
    from cairn.train.config import Data, Train
    from cairn.train.config import Model as Shape
    from cairn.train.data.source import microbatch
    from cairn.train.prepare import prepare
    from cairn.train.step import train_step

    config = Train(
        steps=STEPS,
        out=bench.folder / "run",
        device="cpu",
        model=Shape(preset="tiny-qwen3", layers=2, vocab=64),
        data=Data(sources=["random"], sequence=32, sequences=4, microbatch=4),
    )
    prepared = prepare(config)
    batch = microbatch(prepared.corpus.source, range(4))
    with Watched() as watched:
        for _ in range(STEPS):
            train_step(prepared.state, [batch])
    return watched.names.count(READS)


def _reads_of_usual() -> int:
    """Three numbers that a loop likes to see: is the loss finite, how long is the gradient, what was the "
    "loss."""
    import torch

    from cairn.labs.pytorch._watched import Watched

    model = tiny_model(layers=2)
    tokens_T = tokens_of(model, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms, losses = [], []
    with Watched() as watched:
        for _ in range(STEPS):
            optimizer.zero_grad()
            logits_TV = model.logits(hidden(model, tokens_T))
            loss = torch.nn.functional.cross_entropy(logits_TV, tokens_T)
            if loss.isnan():  # the host waits for the forward pass
                break
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            losses.append(loss.item())
    assert all(map(math.isfinite, (*norms, *losses)))
    return watched.names.count(READS)


def _price(bench: Workbench) -> list[Check]:
    """Host time to queue products, and to queue them with one look at a number after each."""
    import torch

    bench.step("queueing products, with and without looking")
    a = torch.randn(4096, 4096, device=bench.device, dtype=torch.bfloat16)

    def queued(look: bool) -> tuple[float, float]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            y: Any = a @ a
            if look:
                y[0, 0].item()
        returned = time.perf_counter() - start
        torch.cuda.synchronize()
        return returned, time.perf_counter() - start

    queued(False), queued(True)
    (free, total), (held, with_looks) = queued(False), queued(True)
    return [
        Check(
            what=Words(
                "share of the time that the host is busy queueing", "主机排队占总时间的比例"
            ),
            predicted=0.5,
            measured=free / total,
            unit="",
            kind="at_most",
        ),
        Check(
            what=Words("the same with a look after each product", "每次乘法后看一个数时"),
            predicted=0.9,
            measured=held / with_looks,
            unit="",
            kind="at_least",
        ),
    ]


LAB = described(__file__, run)
