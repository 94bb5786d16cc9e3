"""Where does the host wait for the device without being told? At every number that Python wants to see.

    .item(), float(t), if t > 0, print(t), t.cpu()     ->  aten::_local_scalar_dense or a copy: the queue must drain

The waits are counted in the dispatcher, which needs no GPU: our training step must have none, a step as it is often
written has one for each number that it looks at. On a GPU the price is measured too.
"""

import math
import time
from typing import Any

from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
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
        steps=STEPS, out=bench.folder / "run", device="cpu",
        model=Shape(preset="tiny-qwen3", layers=2, vocab=64),
        data=Data(sources=["random"], sequence=32, sequences=4, microbatch=4),
    )  # fmt: skip
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


LAB = Lab(
    name="asynchrony",
    area="pytorch",
    title=Words("Asynchrony and hidden waits", "异步执行与隐藏的同步"),
    hypothesis=Words(
        "Each number that Python looks at is one wait for the device; a step that keeps loss, norm and the "
        "decision to skip on the device has none.",
        "Python 每看一个数就要等设备一次；把 loss、norm 和跳过与否都留在设备上的训练步一次都不等。",
    ),
    run=run,
    causes=(
        Words(
            "a library function that reads a number inside (an assertion, a size that depends on data)",
            "某个库函数内部读了数值（断言、依赖数据的形状）",
        ),
        Words(
            "a step that logs or checkpoints inside the counted part",
            "被计数的部分里有日志或保存检查点",
        ),
    ),
    code=(
        "cairn/train/step.py:train_step",
        "cairn/train/bad_step.py:veto",
        "cairn/kernels/optim/grad_norm.py:clip_scale",
    ),
    reading=(
        "PyTorch: An Imperative Style, High-Performance Deep Learning Library (2019)",
        "CUDA C++ Programming Guide, asynchronous concurrent execution (2024)",
    ),
    questions=(
        Question(
            Words(
                "Why is time.time() around a GPU call wrong?",
                "为什么用 time.time() 给 GPU 调用计时是错的？",
            ),
            Words(
                "The call returns when the kernel is queued, after microseconds. Synchronise before both "
                "readings, or use events, which the device stamps itself.",
                "调用在内核入队后几微秒就返回。要么两端都 synchronize，要么用由设备打时间戳的 event。",
            ),
        ),
        Question(
            Words("How do you find hidden syncs?", "怎么找隐藏的同步？"),
            Words(
                "torch.cuda.set_sync_debug_mode('warn') names the line; on a timeline look for "
                "cudaStreamSynchronize or cudaMemcpy to the host with the GPU idle right after it.",
                "torch.cuda.set_sync_debug_mode('warn') 会指出代码行；时间线上找 cudaStreamSynchronize "
                "或拷到主机的 cudaMemcpy，紧接着 GPU 空闲。",
            ),
        ),
        Question(
            Words(
                "How can a step be skipped on NaN without waiting?",
                "怎样不等待就能在 NaN 时跳过一步？",
            ),
            Words(
                "Make the clip factor NaN on the device and let the optimizer kernel change nothing when it "
                "is not finite; the host reads the loss a step later, when it has long arrived.",
                "在设备上把裁剪系数置为 NaN，优化器内核遇到非有限值就不更新；主机晚一步再读 loss，"
                "那时早已到达。",
            ),
        ),
    ),
    seconds=2.0,
)
