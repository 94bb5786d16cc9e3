"""Which operations pass through the dispatcher, and which of their results still exist."""

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Watched(TorchDispatchMode):
    """Sees every operation below autograd, on this thread: its name, and the memory that its result lives "
    "in."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._results: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(func.name())
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._results[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def operations(self) -> list[str]:
        """Those that compute something: views only describe what is there."""
        views = (
            "view",
            "transpose",
            "slice",
            "expand",
            "unsqueeze",
            "detach",
            "alias",
            "split",
            "select",
        )
        return [name for name in self.names if not any(f"::{view}" in name for view in views)]

    def alive_bytes(self, apart_from: tuple[Tensor, ...] = ()) -> int:
        """Of all results, those whose memory has not been given back."""
        others = {tensor.untyped_storage()._cdata for tensor in apart_from}
        return sum(
            size
            for number, (weak, size) in self._results.items()
            if number not in others and not weak.expired()
        )
