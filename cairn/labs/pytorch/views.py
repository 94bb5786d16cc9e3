"""When does reshaping copy? When no strides can describe the result.

    element (i, j) lies at  offset + i * stride_0 + j * stride_1  of the storage

    transpose, slice, expand, split     other strides over the same storage: nothing moves, time does not depend on size
    contiguous, reshape of a transpose  a new storage: every byte is read and written

A write through one view is seen by all of them; autograd notices by a counter that all views share.
"""

from typing import Any

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.workbench import Workbench


def place(offset: int, strides: tuple[int, ...], index: tuple[int, ...]) -> int:
    """Where in the storage an element lies."""
    return offset + sum(stride * i for stride, i in zip(strides, index, strict=True))


def run(bench: Workbench) -> Outcome:
    import torch

    base = torch.arange(4 * 6 * 5, dtype=torch.float32).view(4, 6, 5)
    made = {
        "transpose": base.transpose(0, 2),
        "slice, every second": base[:, 1::2],
        "expand": base[:1].expand(3, 6, 5),
        "as q, k, v of one projection": base.view(4, 30)[:, 10:20],
        "reshape of a transpose": base.transpose(0, 2).reshape(5, 24),
        "contiguous": base.transpose(0, 2).contiguous(),
    }
    expected_copies = {"reshape of a transpose", "contiguous"}
    rows, wrong, surprises = [], 0, 0
    for name, view in made.items():
        bench.step(name)
        shares = view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        wrong += _wrong_places(view)
        surprises += shares == (name in expected_copies)
        rows.append([name, str(tuple(view.stride())), "no" if shares else "yes", view.nbytes])
    versions = _versions()
    ratio = _growth(bench)
    return Outcome(
        checks=_checks(wrong, surprises, versions, ratio),
        table=Table(
            columns=[
                Words("made by", "操作"),
                Words("strides", "stride"),
                Words("copied", "是否拷贝"),
                Words("bytes", "字节"),
            ],
            rows=rows,
        ),
    )


def _checks(wrong: int, surprises: int, versions: int, ratio: float) -> list[Check]:
    return [
        Check(
            what=Words("elements that are not where strides say", "不在 stride 所指位置的元素数"),
            predicted=0.0,
            measured=float(wrong),
            unit="",
        ),
        Check(
            what=Words(
                "operations that copied or not, against the rule", "是否拷贝与规则不符的操作数"
            ),
            predicted=0.0,
            measured=float(surprises),
            unit="",
        ),
        Check(
            what=Words(
                "version of the base after two writes through views",
                "经视图写两次后 base 的版本号",
            ),
            predicted=2.0,
            measured=float(versions),
            unit="",
        ),
        Check(
            what=Words("transposing 256 times the bytes, time", "字节数 256 倍时转置的耗时比"),
            predicted=2.0,
            measured=ratio,
            unit="x",
            kind="at_most",
        ),
    ]


def _wrong_places(view: Any) -> int:
    """Elements whose value is not that of the storage at the computed place."""
    import itertools

    import torch

    flat = torch.tensor(view.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float32)
    indices = itertools.product(*(range(size) for size in view.shape))
    places = ((index, place(view.storage_offset(), view.stride(), index)) for index in indices)
    return sum(float(view[index]) != float(flat[at]) for index, at in places)


def _versions() -> int:
    """Two views, one write through each: autograd's counter of the base."""
    import torch

    base = torch.zeros(4, 4)
    base[0].add_(1)
    base.T[1].mul_(2)
    return base._version


def _growth(bench: Workbench) -> float:
    """Time of a transpose of a large matrix over that of a small one."""
    import torch

    bench.step("a view of little and of much")
    small, large = torch.zeros(64, 64), torch.zeros(1024, 1024)

    def burst(matrix: Any) -> None:
        for _ in range(200):
            matrix.transpose(0, 1)

    times = [bench.time(burst, [(m,)], device="cpu", budget_ms=200).p10_s for m in (small, large)]
    return times[1] / times[0]


LAB = described(__file__, run)
