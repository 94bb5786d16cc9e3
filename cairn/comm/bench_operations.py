"""Operations that `cairn comm bench` measures, with the inputs and the expected result of each rank.

    place = Place(rank, world, count, ...)          one rank, one size
    form = FORMS["all_gather"](place)               its call, its tensors, its right answer

Small whole numbers are sent, so every result has one right value in every type. In place means that the input lies
where the result will be; torch has only that form of all_reduce, broadcast and reduce, so out of place is a copy and
then the operation. Needs torch; measures nothing.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

Operation = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "reduce", "sendrecv",
    "gather", "scatter",
]  # fmt: skip
# size = all ranks' parts
SHARED = ("all_gather", "reduce_scatter", "alltoall", "gather", "scatter")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
NEVER_IN_PLACE = ("alltoall", "sendrecv", "gather", "scatter")
TYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}


class OperationForm(NamedTuple):
    """The call of one rank and its expected result."""

    call: Callable[[], None]
    reset: Callable[[], object]  # before a call whose result is looked at
    result: torch.Tensor
    expected: torch.Tensor | None  # None: this rank receives nothing


class RankData:
    """A rank of a group with its input vector of `count` elements and its result vector."""

    def __init__(
        self,
        rank: int,
        world: int,
        count: int,
        *,
        type: str,
        reduction: str,
        root: int,
        in_place: bool,
        group: Any,
        device: str,
        calls: Any = dist,
    ) -> None:
        """`calls` has the functions of torch.distributed: its module, or what speaks to another library."""
        self.rank, self.world, self.count, self.root = rank, world, count, root
        self.in_place, self.group, self.calls = in_place, group, calls
        self.dtype, self.reduction, self.op = TYPES[type], reduction, REDUCTIONS[reduction]
        self.each = count // world
        self.own = slice(rank * self.each, (rank + 1) * self.each)  # this rank's part of a vector
        self.mine = self.values(rank).to(device)
        self.result = torch.empty_like(self.mine)

    def named(self, new: str, old: str) -> Any:
        """torch 2.13 has new names, and warns of the old ones."""
        return getattr(self.calls, new, None) or getattr(self.calls, old)

    def values(self, rank: int) -> torch.Tensor:
        """The input of a rank: 1, 2, 3 repeated with an offset for each rank; 1 and 2 for products."""
        most = 2 if self.reduction == "prod" else 3  # powers of two are exact in every type
        return ((torch.arange(self.count) + rank) % most + 1).to(self.dtype)

    def reduced(self) -> torch.Tensor:
        """Whole numbers that overflow wrap around, as they do when types of few bits are added."""
        wide = torch.float64 if self.dtype.is_floating_point else torch.int64
        every = torch.stack([self.values(rank).to(wide) for rank in range(self.world)])
        match self.reduction:
            case "sum":
                result = every.sum(0)
            case "avg":
                result = every.sum(0).to(self.dtype) / self.world
            case "prod":
                result = every.prod(0)
            case "min":
                result = every.amin(0)
            case _:
                result = every.amax(0)
        return result.to(self.dtype)

    def parts(self, part: slice | None = None) -> torch.Tensor:
        """The same part of every rank's vector, one behind the other; without it, each one's first."""
        return torch.cat(
            [self.values(rank)[part or slice(self.each)] for rank in range(self.world)]
        )

    def worked_on(
        self, operation: Callable[[torch.Tensor], object], expected: torch.Tensor | None
    ) -> OperationForm:
        """An operation that has its result where its input was."""
        result, mine = self.result, self.mine

        def out_of_place() -> None:
            result.copy_(mine)
            operation(result)

        def within() -> None:
            operation(result)

        call = within if self.in_place else out_of_place
        reset = (lambda: result.copy_(mine)) if self.in_place else (lambda: result.fill_(0))
        return OperationForm(call, reset, result, expected)


def all_reduce(at: RankData) -> OperationForm:
    return at.worked_on(lambda x: at.calls.all_reduce(x, at.op, group=at.group), at.reduced())


def broadcast(at: RankData) -> OperationForm:
    return at.worked_on(
        lambda x: at.calls.broadcast(x, at.root, group=at.group), at.values(at.root)
    )


def reduce(at: RankData) -> OperationForm:
    expected = at.reduced() if at.rank == at.root else None
    return at.worked_on(lambda x: at.calls.reduce(x, at.root, at.op, group=at.group), expected)


def all_gather(at: RankData) -> OperationForm:
    result, first = at.result, at.mine[: at.each]
    source = result[at.own] if at.in_place else first.clone()

    gathered = at.named("all_gather_single", "all_gather_into_tensor")

    def call() -> None:
        gathered(result, source, group=at.group)

    reset = (lambda: source.copy_(first)) if at.in_place else (lambda: result.fill_(0))
    return OperationForm(call, reset, result, at.parts())


def reduce_scatter(at: RankData) -> OperationForm:
    source = at.result if at.in_place else at.mine
    target = at.result[at.own] if at.in_place else at.result[: at.each].clone()

    scattered = at.named("reduce_scatter_single", "reduce_scatter_tensor")

    def call() -> None:
        scattered(target, source, at.op, group=at.group)

    reset = (lambda: source.copy_(at.mine)) if at.in_place else (lambda: target.fill_(0))
    return OperationForm(call, reset, target, at.reduced()[at.own])


def alltoall(at: RankData) -> OperationForm:
    def call() -> None:
        at.calls.all_to_all_single(at.result, at.mine, group=at.group)

    return OperationForm(call, lambda: at.result.fill_(0), at.result, at.parts(at.own))


def sendrecv(at: RankData) -> OperationForm:
    """Each rank sends to the next and receives from the previous one."""
    after, before = (at.rank + 1) % at.world, (at.rank - 1) % at.world

    def call() -> None:
        work = at.calls.isend(at.mine, after, group=at.group)
        at.calls.recv(at.result, before, group=at.group)
        if work is not None:
            work.wait()

    return OperationForm(call, lambda: at.result.fill_(0), at.result, at.values(before))


def gather(at: RankData) -> OperationForm:
    here = at.rank == at.root
    source = at.mine[: at.each].clone()
    into = list(at.result.split(at.each)) if here else None

    def call() -> None:
        at.calls.gather(source, into, at.root, group=at.group)

    return OperationForm(call, lambda: at.result.fill_(0), at.result, at.parts() if here else None)


def scatter(at: RankData) -> OperationForm:
    pieces = list(at.mine.split(at.each)) if at.rank == at.root else None
    target = at.result[: at.each].clone()

    def call() -> None:
        at.calls.scatter(target, pieces, at.root, group=at.group)

    return OperationForm(call, lambda: target.fill_(0), target, at.values(at.root)[at.own])


FORMS: dict[Operation, Callable[[RankData], OperationForm]] = {
    "all_reduce": all_reduce, "all_gather": all_gather, "reduce_scatter": reduce_scatter,
    "alltoall": alltoall, "broadcast": broadcast, "reduce": reduce, "sendrecv": sendrecv,
    "gather": gather, "scatter": scatter,
}  # fmt: skip
