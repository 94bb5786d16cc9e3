"""Does cutting a batch into microbatches change the gradient, and what does it save? Nothing, and all but one part.

    8 samples at once      activations of 8           8 x 1 sample      activations of 1, gradients added up

Bytes that autograd keeps for backward are counted as they are kept; the gradient is compared element by element.
"""

from typing import Any

from cairn.labs.lab import Check, Outcome, Plot, Points, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.training._spread import SEED, Setting, batches, tiny
from cairn.labs.workbench import Workbench

SAMPLES = 8


def kept_bytes(call: Any, weights: set[int]) -> int:
    """The most bytes that were saved for backward at any one time in `call`; weights are there anyway."""
    import torch

    alive, most = 0, 0
    references: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> Any:
        nonlocal alive, most
        place = tensor.untyped_storage().data_ptr()
        if place not in weights:
            references[place] = references.get(place, 0) + 1
            if references[place] == 1:
                alive += tensor.untyped_storage().nbytes()
                most = max(most, alive)
        return _Kept(tensor, place, forget)

    def forget(place: int, size: int) -> None:
        nonlocal alive
        if place in references:
            references[place] -= 1
            if not references[place]:
                del references[place]
                alive -= size

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        call()
    return most


class _Kept:
    """A saved tensor that says when autograd lets go of it."""

    def __init__(self, tensor: Any, place: int, forget: Any) -> None:
        self.tensor, self.place, self.forget = tensor, place, forget

    def __del__(self) -> None:
        self.forget(self.place, self.tensor.untyped_storage().nbytes())


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    from cairn.train.data.batch import join
    from cairn.train.objective import Objective
    from cairn.train.parallel.mesh import Mesh
    from cairn.train.parallel.parallelize import parallelize

    setting = Setting(tiny(), per_step=SAMPLES, tokens=bench.setting("tokens", bench.pick(64, 32)))
    every, loss = batches(setting, 0), Objective(setting.spec)
    valid = torch.tensor(float(sum(one.valid() for one in every)))
    gradients: dict[int, dict[str, torch.Tensor]] = {}
    measured, predicted, rows = [], [], []
    for size in (8, 4, 2, 1):
        bench.step(f"{SAMPLES // size} microbatches of {size}")
        parts = [join(every[at : at + size]) for at in range(0, SAMPLES, size)]
        parallel = parallelize(setting.spec, Mesh.alone(), seed=SEED)
        weights = {p.untyped_storage().data_ptr() for p in parallel.parameters().values()}
        most = kept_bytes(lambda a=parallel, b=parts: a.forward_backward(b, loss, valid), weights)
        gradients[size] = {name: g.clone() for name, g in parallel.gradients().items()}
        measured.append((float(size), most / 1024))
        predicted.append((float(size), measured[0][1] * size / 8))
        apart = max(float((gradients[8][n] - g).abs().max()) for n, g in gradients[size].items())
        rows.append([size, SAMPLES // size, most / 1024, measured[0][1] * size / 8, apart])
    return Outcome(
        checks=_checks(rows, measured),
        plots=[
            Plot(
                title=Words("Kept for backward", "为反向保存的字节"),
                x=Words("samples of a microbatch", "每个 microbatch 的样本数"),
                y=Words("KiB", "KiB"),
                lines={"in proportion": predicted, "counted": measured},
                log_x=True,
                log_y=True,
            )
        ],
        table=Table(
            columns=[
                Words("microbatch", "microbatch"),
                Words("how many", "个数"),
                Words("KiB kept", "保存 KiB"),
                Words("predicted", "预测"),
                Words("difference of gradients", "梯度差异"),
            ],
            rows=rows,
        ),
    )


def _checks(rows: list[list[float]], measured: Points) -> list[Check]:
    return [
        Check(
            what=Words("largest difference of any gradient", "梯度的最大差异"),
            predicted=1e-5,
            measured=max(row[4] for row in rows),
            unit="",
            kind="at_most",
        ),
        Check(
            what=Words(
                "bytes kept by microbatches of 1, of those of 8",
                "microbatch 为 1 与 8 时保存激活之比",
            ),
            predicted=1 / 8,
            measured=measured[-1][1] / measured[0][1],
            unit="x",
            within=0.25,
        ),
    ]


LAB = described(__file__, run)
