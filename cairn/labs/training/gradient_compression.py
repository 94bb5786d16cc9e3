"""How few bytes can a gradient have and still teach? One in a hundred, if what was left out is remembered.

    top-k             send the k largest, forget the rest             stalls: small gradients never go out
    + error feedback  send the k largest of (gradient + what was left) every part comes through in the end

Several workers with data of their own fit the same model. Bytes are counted for the blocks that are sent, by the rule
of this project's sparse all-reduce.
"""

from typing import Any

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

WORKERS, BLOCK = 4, 8
KEPT = 0.05  # of the blocks


class Compressor:
    """Keeps the largest blocks of one worker's gradient; with feedback the rest is carried over."""

    def __init__(self, blocks: int, feedback: bool) -> None:
        import torch

        self.keep, self.feedback = max(1, int(KEPT * blocks)), feedback
        self.left = torch.zeros(blocks, BLOCK)

    def __call__(self, gradient: Any) -> Any:
        import torch

        whole = gradient.view(-1, BLOCK) + self.left
        chosen = whole.norm(dim=1).topk(self.keep).indices
        compressed = torch.zeros_like(whole)
        compressed[chosen] = whole[chosen]
        if self.feedback:
            self.left = whole - compressed
        return compressed


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    torch.manual_seed(0)
    features, rows = 1024, 320
    # Features of very different size: the gradients of small ones are never among the largest.
    scale = torch.logspace(0, -1.0, features)
    truth = torch.randn(features)
    inputs = [torch.randn(rows, features) * scale for _ in range(WORKERS)]
    targets = [x @ truth for x in inputs]
    steps = bench.setting("steps", bench.pick(250, 120))
    curves: dict[str, list[tuple[float, float]]] = {}
    share = 1.0
    for name in ("dense", "top-k", "top-k + feedback"):
        bench.step(f"{name}: {steps} steps of {WORKERS} workers")
        curves[name], share = _train(name, inputs, targets, steps, share)
    start = curves["dense"][0][1]
    final = {name: curve[-1][1] / start for name, curve in curves.items()}
    return Outcome(
        checks=_checks(share, final),
        plots=[
            Plot(
                title=Words("Loss with 5% of the gradient", "只发送 5% 梯度时的 loss"),
                x=Words("step", "步"),
                y=Words("loss", "loss"),
                lines=curves,
                log_y=True,
            )
        ],
        table=Table(
            columns=[Words("form", "形式"), Words("loss left, of the first", "剩余 loss 比例")],
            rows=[[name, value] for name, value in final.items()],
        ),
    )


def _checks(share: float, final: dict[str, float]) -> list[Check]:
    return [
        Check(
            what=Words("bytes sent, of a dense all-reduce", "与稠密 all-reduce 的字节比"),
            predicted=expected_share(),
            measured=share,
            unit="x",
            kind="at_most",
            within=0.45,  # the busiest owner counts, and blocks are few
        ),
        Check(
            what=Words("loss left without feedback over with it", "无反馈与有反馈的剩余 loss 之比"),
            predicted=2.0,
            measured=final["top-k"] / final["top-k + feedback"],
            unit="x",
            kind="at_least",
        ),
        Check(
            what=Words("loss left with feedback, of the first", "有反馈时剩余 loss 占初始的比例"),
            predicted=0.05,
            measured=final["top-k + feedback"],
            unit="share",
            kind="at_most",
        ),
    ]


def expected_share() -> float:
    """Blocks of different workers at random places: all of the union comes back to everybody."""
    union = 1 - (1 - KEPT) ** WORKERS
    away = (WORKERS - 1) / WORKERS
    return (KEPT + away * union) / (2 * away)


def _train(
    name: str, inputs: list[Any], targets: list[Any], steps: int, share: float
) -> tuple[list[tuple[float, float]], float]:
    import torch

    from cairn.labs.torch_backend.sparse import share_of_dense

    features = inputs[0].shape[1]
    weights, rate = torch.zeros(features), 0.15
    workers = [Compressor(features // BLOCK, "feedback" in name) for _ in inputs]
    curve, shares = [], []
    for step in range(steps):
        compressed, loss = [], 0.0
        for x, y, compress in zip(inputs, targets, workers, strict=True):
            error = x @ weights - y
            loss += float(error.square().mean()) / len(inputs)
            gradient = x.t() @ error / len(y)
            compressed.append(gradient.view(-1, BLOCK) if name == "dense" else compress(gradient))
        if name != "dense":
            shares.append(
                share_of_dense(torch.stack([g.abs().sum(1) > 0 for g in compressed]).numpy())
            )
        weights -= rate * torch.stack(compressed).mean(0).flatten()
        if step % 10 == 0 or step == steps - 1:
            curve.append((float(step), loss))
    return curve, (sum(shares) / len(shares) if shares else share)


LAB = described(__file__, run)
