"""A hundred fine-tunes, one base model: can requests of different adapters share a step?

    y = x W^T + (x A_i^T) B_i^T          W once for the whole batch, A_i and B_i of the row's own adapter

    merged     a copy of W for each adapter, and a product for each: nothing is shared
    batched    one product with W, and two small ones gathered by row

The adapters add r (in + out) / (in x out) to bytes and FLOPs; the results have to be the same.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from cairn.labs.lab import Check, Outcome, Plot, Rows, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from torch import Tensor


class Adapters(NamedTuple):
    """All adapters of one matrix, side by side."""

    a_IRK: "Tensor"
    b_INR: "Tensor"


class Case(NamedTuple):
    weight_NK: "Tensor"  # the base
    adapters: Adapters
    copies_INK: "Tensor"  # the base with each adapter added


def batched(x_MK: "Tensor", weight_NK: "Tensor", adapters: Adapters, which_M: "Tensor") -> "Tensor":
    """One product with the base; then each row with its own two small matrices."""
    import torch

    low_MR = torch.einsum("mk,mrk->mr", x_MK, adapters.a_IRK[which_M])
    return x_MK @ weight_NK.t() + torch.einsum("mr,mnr->mn", low_MR, adapters.b_INR[which_M])


def served(x_MK: "Tensor", weight_NK: "Tensor", adapters: Adapters, which_M: "Tensor") -> "Tensor":
    """What the engine's kernels are held against: the specification of adding an adapter to each row."""
    from cairn.kernels.adapter.lora import lora_add_reference

    slots = [[(a_RK, b_NR, 1.0)] for a_RK, b_NR in zip(*adapters, strict=True)]
    y_MN = x_MK @ weight_NK.t()
    return lora_add_reference(y_MN, x_MK, slots, which_M.tolist(), [len(weight_NK)])


def grouped(x_MK: "Tensor", weight_NK: "Tensor", adapters: Adapters, which_M: "Tensor") -> "Tensor":
    """The same, with the rows of one adapter together: one small product for each adapter that is there."""
    y_MN = x_MK @ weight_NK.t()
    for index in which_M.unique().tolist():
        rows = (which_M == index).nonzero()[:, 0]
        y_MN[rows] += x_MK[rows] @ adapters.a_IRK[index].t() @ adapters.b_INR[index].t()
    return y_MN


def merged(x_MK: "Tensor", merged_INK: "Tensor", which_M: "Tensor") -> "Tensor":
    """Every adapter folded into its own copy of the matrix."""
    import torch

    y_MN = torch.empty(len(x_MK), merged_INK.shape[1])
    for index in which_M.unique().tolist():
        rows = (which_M == index).nonzero()[:, 0]
        y_MN[rows] = x_MK[rows] @ merged_INK[index].t()
    return y_MN


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    size, rank, count = bench.size("width"), 8, bench.size("adapters")
    batch = count
    case = made(size, rank, count)
    rows, lines, far = [], {name: [] for name in FORMS}, 0.0
    for kinds in sorted({1, count // 4, count}):
        bench.step(f"{batch} rows of {kinds} adapters")
        which_M = torch.arange(batch) % kinds
        x_MK = torch.randn(batch, size, generator=torch.Generator().manual_seed(kinds)) / size**0.5
        far = max(far, disagreement(case, x_MK, which_M))
        took = {
            name: bench.time(form, [(case, x_MK, which_M)], device="cpu", budget_ms=120).p10_s * 1e3
            for name, form in FORMS.items()
        }
        for name, ms in took.items():
            lines[name].append((float(kinds), ms))
        rows.append([kinds, *took.values()])
    added = rank * 2 * size / size**2
    adapter_share = (
        case.adapters.a_IRK.nbytes + case.adapters.b_INR.nbytes
    ) / case.copies_INK.nbytes
    gain = lines["merged"][-1][1] / lines["batched"][-1][1]
    return Outcome(
        checks=_checks(far, added, adapter_share, gain, count),
        plots=[
            Plot(
                title=Words("One matrix, one step", "单个矩阵、单步"),
                x=Words("adapters in the step", "一步中的 adapter 数"),
                y=Words("milliseconds", "毫秒"),
                lines=lines,
            )
        ],
        table=_table(rows),
        notes=[_note(rank, added)],
    )


def made(size: int, rank: int, count: int) -> Case:
    """A square matrix, adapters of this rank, and the matrix with each of them added."""
    import torch

    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> "Tensor":
        return torch.randn(*shape, generator=draw) / shape[-1] ** 0.5

    weight_NK = drawn(size, size)
    adapters = Adapters(drawn(count, rank, size), drawn(count, size, rank))
    copies = [weight_NK + b_NR @ a_RK for a_RK, b_NR in zip(*adapters, strict=True)]
    return Case(weight_NK, adapters, torch.stack(copies))


def disagreement(case: Case, x_MK: "Tensor", which_M: "Tensor") -> float:
    """The largest difference of any shared form to merged weights."""
    reference_MN = merged(x_MK, case.copies_INK, which_M)
    return max(
        float((form(x_MK, case.weight_NK, case.adapters, which_M) - reference_MN).abs().max())
        for form in (batched, grouped, served)
    )


# What is timed, in the order of the table's columns.
FORMS: "dict[str, Callable[[Case, Tensor, Tensor], Tensor]]" = {
    "base alone": lambda case, x_MK, which_M: x_MK @ case.weight_NK.t(),
    "batched": lambda case, x_MK, which_M: batched(x_MK, case.weight_NK, case.adapters, which_M),
    "merged": lambda case, x_MK, which_M: merged(x_MK, case.copies_INK, which_M),
}


def _checks(far: float, added: float, kept: float, gain: float, count: int) -> list[Check]:
    return [
        Check(
            what=Words("difference to merged weights", "与合并权重结果之差"),
            predicted=1e-4,
            measured=far,
            unit="",
            kind="at_most",
        ),
        Check(
            what=Words(
                "memory of all adapters over one merged copy each",
                "全部 adapter 占合并副本内存的比例",
            ),
            predicted=added,
            measured=kept,
            unit="share",
            within=1e-9,
        ),
        Check(
            what=Words(
                f"{count} adapters in one step: merged over batched",
                f"一步中 {count} 个 adapter：合并/批处理",
            ),
            predicted=1.3,
            measured=gain,
            unit="x",
            kind="at_least",
        ),
    ]


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("adapters", "adapter 数"),
            Words("base alone, ms", "仅基座（毫秒）"),
            Words("batched, ms", "批处理（毫秒）"),
            Words("merged copies, ms", "合并副本（毫秒）"),
        ],
        rows=rows,
    )


def _note(rank: int, added: float) -> Words:
    return Words(
        f"Rank {rank} adds {added:.1%} to the matrix. At 4096 x 4096 it is 0.4%: a hundred adapters are as "
        "large as four tenths of the base.",
        f"rank {rank} 给该矩阵增加 {added:.1%}；4096×4096 时只有 0.4%，一百个 adapter 也只有基座的四成。",
    )


LAB = described(__file__, run)
