"""The reductions of torch.distributed on two tensors, and which types they are for.

`combine(name, dtype)` is a function that reduces its second argument into its first. Sums of booleans
are "or", as torch adds them; an average is a sum that `finish` divides. What cannot be computed is
refused by name before anything is sent.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cairn.labs.torch_backend.errors import CommError
from cairn.labs.torch_backend.link import Combine

NAMES: dict[int, str] = {  # by number: an enum of C++ takes longer to look up than a small message
    int(kind): kind.name.lower()  # pyrefly: ignore
    for kind in (
        dist.ReduceOp.SUM,
        dist.ReduceOp.AVG,
        dist.ReduceOp.PRODUCT,
        dist.ReduceOp.MIN,
        dist.ReduceOp.MAX,
        dist.ReduceOp.BAND,
        dist.ReduceOp.BOR,
        dist.ReduceOp.BXOR,
    )
}
COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "product": torch.Tensor.mul_,
    "min": lambda into, other: torch.minimum(into, other, out=into),
    "max": lambda into, other: torch.maximum(into, other, out=into),
    "band": torch.Tensor.bitwise_and_,
    "bor": torch.Tensor.bitwise_or_,
    "bxor": torch.Tensor.bitwise_xor_,
}
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
TYPES: dict[str, tuple[torch.dtype, ...]] = {
    "sum": (*FLOATS, *INTEGERS, torch.bool, *COMPLEX),
    "avg": (*FLOATS, *COMPLEX),
    "product": (*FLOATS, *INTEGERS, torch.bool, *COMPLEX),
    "min": (*FLOATS, *INTEGERS, torch.bool),
    "max": (*FLOATS, *INTEGERS, torch.bool),
    "band": (*INTEGERS, torch.bool),
    "bor": (*INTEGERS, torch.bool),
    "bxor": (*INTEGERS, torch.bool),
}


def name_of(op: Any) -> str:
    """ "sum" and so on, of a ReduceOp."""
    name = NAMES.get(int(getattr(op, "op", op)))
    if name is None:
        raise CommError(f"the cairn backend has no reduction {op}", hint=f"one of {list(TYPES)}")
    return name


def combine(name: str, dtype: torch.dtype) -> Combine:
    if dtype not in TYPES[name]:
        kinds = ", ".join(str(kind).removeprefix("torch.") for kind in TYPES[name])
        raise CommError(f"no {name} of {dtype}", hint=f"it is there for {kinds}")
    return COMBINE[name]


def finish(name: str, result: torch.Tensor, ranks: int) -> None:
    """Divide the sum by the number of ranks for an average."""
    if name == "avg":
        result.div_(ranks)
