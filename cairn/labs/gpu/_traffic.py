"""Bytes that torch's operations read and write, counted as they pass through the dispatcher."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    """Each operation reads its inputs and writes its results; views move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if written and not func.is_view:
            self.operations.append(func.name())
            fresh = {
                id(tensor): tensor for tensor in (*read, *written)
            }  # in place counts twice below
            self.bytes += sum(tensor.nbytes for tensor in fresh.values())
            again = {id(tensor) for tensor in read} & {id(tensor) for tensor in written}
            self.bytes += sum(fresh[number].nbytes for number in again)
        return result
