"""Weight gradients later: the backward of a linear map in two parts.

While `deferring` is on, `F.linear` with a parameter as its weight becomes a function whose backward computes only the
gradient of the input and leaves the rest in a list: (weight, input, gradient of the output). `compute_deferred` does
the rest. Gradients of norms, biases and lookups are small and come at once, in the first part.

Layers need not know: they call `F.linear` as always.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

Deferred = list[tuple[nn.Parameter, Tensor, Tensor]]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferred: Deferred
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.deferred, ctx.with_bias = weight, deferred, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (x,) = gradients, ctx.saved_tensors
        ctx.deferred.append((ctx.weight, x, gradient))
        bias = gradient.flatten(0, -2).sum(0) if ctx.with_bias else None
        return gradient @ ctx.weight, None, bias, None


class _Interception(TorchFunctionMode):
    def __init__(self, deferred: Deferred) -> None:
        super().__init__()
        self.deferred = deferred

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.linear and torch.is_grad_enabled():
            x, weight, bias = _arguments(*args, **(kwargs or {}))
            if isinstance(weight, nn.Parameter) and weight.requires_grad and x.requires_grad:
                return _Linear.apply(x, weight, bias, self.deferred)
        return func(*args, **(kwargs or {}))


def _arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


@contextmanager
def deferring(deferred: Deferred | None) -> Iterator[None]:
    """Linear maps computed inside leave their weight gradients in `deferred`; None: nothing changes."""
    if deferred is None:
        yield
        return
    with _Interception(deferred):
        yield


def recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts for torch's checkpoint, so that recomputation defers weight gradients as the forward did."""
    modes = _get_current_function_mode_stack()
    active = next((mode.deferred for mode in modes if isinstance(mode, _Interception)), None)
    return nullcontext(), deferring(active)


def compute_deferred(deferred: Deferred) -> None:
    """Computes the weight gradients that were left, and adds them where they belong."""
    with torch.no_grad():
        for weight, x, gradient in deferred:
            rows = gradient.flatten(0, -2)
            if weight.grad is None:
                weight.grad = rows.t() @ x.flatten(0, -2)
            else:
                weight.grad.addmm_(rows.t(), x.flatten(0, -2))
    deferred.clear()
