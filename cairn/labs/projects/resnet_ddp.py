"""A small ResNet in DistributedDataParallel with AMP: when is it the training of one device?

    two ranks of 8 images                     one process with 16
    GroupNorm: each image by itself           the same gradients, to rounding
    BatchNorm: statistics of the local 8      another training: samples see each other through the mean

Torch's own DDP over gloo, one step of forward and backward. bf16 autocast runs the convolutions in 8 bits of mantissa:
the loss moves by less than those bits.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.ranks import run_ranks
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from torch import Tensor, nn

RANKS, CHANNELS, CLASSES, SIDE = 2, 16, 10, 16
NORMS = ("group", "batch")


class Step(NamedTuple):
    loss: float
    gradients: Any  # one vector


def resnet(norm: str) -> "nn.Module":
    """A stem, three residual blocks and a classifier."""
    import torch
    from torch import nn

    def normed() -> nn.Module:
        return nn.BatchNorm2d(CHANNELS) if norm == "batch" else nn.GroupNorm(4, CHANNELS)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maps = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(2))
            self.norms = nn.ModuleList(normed() for _ in range(2))

        def forward(self, x_BCHW: "Tensor") -> "Tensor":
            y = torch.relu(self.norms[0](self.maps[0](x_BCHW)))
            return torch.relu(x_BCHW + self.norms[1](self.maps[1](y)))

    torch.manual_seed(0)
    blocks = [Block() for _ in range(3)]
    pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, CLASSES)]
    return nn.Sequential(nn.Conv2d(3, CHANNELS, 3, padding=1), normed(), *blocks, *pooled)


def images(count: int) -> "tuple[Tensor, Tensor]":
    import torch

    draw = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, SIDE, SIDE, generator=draw)
    return x, torch.randint(CLASSES, (count,), generator=draw)


def step_of(model: "nn.Module", x: "Tensor", labels: "Tensor", amp: bool) -> Step:
    import torch
    from torch.nn import functional as F

    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        loss = F.cross_entropy(model(x), labels)
    loss.backward()
    flat = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
    return Step(float(loss.detach()), flat)


def on_rank(rank: int, count: int, batch: int, amp: bool) -> dict[str, Step]:
    """This rank's share of the images through DDP, with each norm."""
    from torch.nn.parallel import DistributedDataParallel

    x, labels = images(count * batch)
    mine = slice(rank * batch, (rank + 1) * batch)
    return {
        norm: step_of(DistributedDataParallel(resnet(norm)), x[mine], labels[mine], amp)
        for norm in NORMS
    }


def apart(ranks: list[dict[str, Step]], alone: Step, norm: str) -> float:
    """Largest difference of a gradient, over the largest gradient."""
    worst = max(float((rank[norm].gradients - alone.gradients).abs().max()) for rank in ranks)
    return worst / float(alone.gradients.abs().max())


@one_thread()
def run(bench: Workbench) -> Outcome:
    batch = bench.setting("batch", bench.pick(16, 8))
    x, labels = images(RANKS * batch)
    bench.step("one process, the whole batch")
    alone = {norm: step_of(resnet(norm), x, labels, amp=False) for norm in NORMS}
    half = step_of(resnet("group"), x, labels, amp=True)
    bench.step(f"{RANKS} ranks in DDP")
    ranks = run_ranks(RANKS, on_rank, batch, False)
    group, norm = (apart(ranks, alone[name], name) for name in NORMS)
    return Outcome(
        checks=_checks(group, norm, abs(half.loss - alone["group"].loss) / alone["group"].loss),
        table=Table(
            columns=[
                Words("norm", "归一化"),
                Words("gradient difference, share of the largest", "梯度差（占最大梯度之比）"),
            ],
            rows=[["GroupNorm", group], ["BatchNorm", norm]],
        ),
    )


def _checks(group: float, norm: float, moved: float) -> list[Check]:
    return [
        Check(
            what=Words(
                "GroupNorm: gradients of two ranks beside one process",
                "GroupNorm：双 rank 与单进程的梯度差",
            ),
            predicted=1e-5,
            measured=group,
            unit="",
            kind="at_most",
        ),
        Check(
            what=Words(
                "BatchNorm: gradients of two ranks beside one process",
                "BatchNorm：双 rank 与单进程的梯度差",
            ),
            predicted=1e-2,
            measured=norm,
            unit="",
            kind="at_least",
        ),
        Check(
            what=Words("loss moved by bf16 autocast", "bf16 autocast 使 loss 变化"),
            predicted=2**-8,
            measured=moved,
            unit="share",
            kind="at_most",
            within=1.0,  # sums of rounded numbers: a few units in the last place
        ),
    ]


LAB = described(__file__, run)
