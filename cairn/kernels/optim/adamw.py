"""AdamW over many tensors in one launch: decoupled weight decay, and gradients scaled on the way.

    m += (1 - beta1) (g - m);  v += (1 - beta2) (g^2 - v)
    w  = w (1 - lr decay) - lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

Three ways to keep a model, distinguished by the types of the tensors:
    float32 weights                                   28 bytes per parameter with float32 gradients
    bfloat16 weights, float32 masters and states      28 with bfloat16 gradients
    bfloat16 weights and states, no masters           14: what is stored is rounded up or down at random, with
                                                      the chances that make it right on average
Random bits come from a hash of (seed, step, tensor, element), so a step can be repeated exactly. Gradients are
multiplied by a number that is read on the GPU (see grad_norm); if it is NaN or infinite the step changes nothing. The
host never waits. Computed in float32. Knows nothing about schedules or which tensors decay.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import FLOATS, check, require, short
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rows import launch
from cairn.kernels.optim.grad_norm import TYPES
from cairn.kernels.optim.tensor_table import CHUNK, check_roles, pointer, size_of, tables
from cairn.kernels.tuned import tuned

WIDE = {"block": 512, "warps": 4, "stages": 1}  # four elements for each thread: 16 bytes of float32
NARROW = {"block": 1024, "warps": 4, "stages": 1}  # eight: 16 bytes of bfloat16
_MASK = 0xFFFFFFFF


class Step(NamedTuple):
    """Hyperparameters of an optimizer step on the host."""

    number: int  # 1 for the first
    lr: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    seed: int = 0

    def coefficients(self) -> tuple[float, ...]:
        """beta1, beta2, eps, what weights keep, the step size, one over the root of v's correction."""
        require(self.number >= 1, "step.number", "1 or more", self.number)
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"step.{name}", "0 to less than 1", self)
        for name in ("lr", "eps", "weight_decay"):
            require(0 <= getattr(self, name) < math.inf, f"step.{name}", "0 or more", self)
        size = self.lr / (1 - self.beta1**self.number)
        root = 1 / math.sqrt(1 - self.beta2**self.number)
        return self.beta1, self.beta2, self.eps, 1 - self.lr * self.weight_decay, size, root

    def key(self) -> int:
        """Seed and step as 32 bits, signed as the kernel takes them."""
        mixed = self.seed & _MASK
        for part in (self.seed >> 32 & _MASK, self.number & _MASK):
            mixed = _mixed(mixed * 0x9E3779B1 + part)
        return mixed - (1 << 32) if mixed >= 1 << 31 else mixed


class State(NamedTuple):
    """The tensors of a model in the roles that the update knows; each role of one type."""

    weights: Sequence[Tensor]
    grads: Sequence[Tensor]
    m: Sequence[Tensor]
    v: Sequence[Tensor]
    masters: Sequence[Tensor] | None = None

    def roles(self) -> dict[str, Sequence[Tensor]]:
        return {name: role for name, role in self._asdict().items() if role is not None}


def adamw_reference(state: State, step: Step, scale: Tensor | None = None) -> None:
    """Reference: update the tensors in place, one after another."""
    beta1, beta2, eps, kept, size, root = step.coefficients()
    factor = torch.ones(()) if scale is None else scale
    if not factor.isfinite():
        return
    wide = torch.float64 if state.m[0].dtype == torch.float64 else torch.float32
    for number, (weight, grad, m, v) in enumerate(zip(*state[:4], strict=True)):
        master = weight if state.masters is None else state.masters[number]
        g = grad.to(wide) * factor.to(wide)
        new_m = m.to(wide) + (g - m.to(wide)) * (1 - beta1)
        new_v = v.to(wide) * beta2 + g * g * (1 - beta2)
        new_w = master.to(wide) * kept - size * (new_m / (new_v.sqrt() * root + eps))
        bits_w, bits_m, bits_v = _random_bits(step.key(), number, weight)
        m.copy_(_kept(new_m, m.dtype, bits_m))
        v.copy_(_kept(new_v, v.dtype, bits_v))
        if master is not weight:
            weight.copy_(new_w)
        master.copy_(_kept(new_w, master.dtype, bits_w))


def _kept(value: Tensor, dtype: torch.dtype, bits: Tensor) -> Tensor:
    if dtype != torch.bfloat16:
        return value
    return (value.view(torch.int32) + bits.int() & -65536).view(torch.float32)


def _random_bits(key: int, number: int, like: Tensor) -> list[Tensor]:
    """16 random bits for the weight, m and v of each element."""
    element = torch.arange(like.numel(), device=like.device)
    chunk = _mixed(_mixed(key + number * 0x9E3779B1) + element // CHUNK)
    first = _mixed(chunk + element % CHUNK * 0x85EBCA6B)
    second = _mixed(first + 0x9E3779B9)
    bits = (first & 0xFFFF, first >> 16, second & 0xFFFF)
    return [one.view(like.shape) for one in bits]


def _mixed(x: Any) -> Any:
    """32 bits in, 32 bits out, each depending on all: what `_mix` does, for Python's and 64-bit integers."""
    x = x & _MASK
    x = (x ^ x >> 16) * 0x7FEB352D & _MASK
    x = (x ^ x >> 15) * 0x846CA68B & _MASK
    return x ^ x >> 16


@triton.jit
def _mix(x):
    """A hash of 32 bits with little bias (two multiplications, three shifts)."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _rounded(x, bits, dtype: tl.constexpr):
    """bfloat16 is rounded by adding random bits below its last one and cutting off; others are kept."""
    if dtype == tl.bfloat16:
        raised = x.to(tl.uint32, bitcast=True) + bits & 0xFFFF0000
        x = tl.where(x == x, raised.to(tl.float32, bitcast=True), x)  # a NaN stays one
    return x.to(dtype)


@triton.jit(do_not_specialize=["tensors", "key"])
def _adamw_kernel(
    addresses, sizes, numbers, tensor_of, chunk_of, scale, tensors, key,
    beta1, beta2, eps, kept, step_size, root,
    W: tl.constexpr, G: tl.constexpr, S: tl.constexpr, MASTERS: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """W, G, S: types of weights, gradients and states."""
    tensor = tl.load(tensor_of + tl.program_id(0))
    chunk = tl.load(chunk_of + tl.program_id(0))
    size = size_of(sizes, tensor, ALIGNED)
    weight = pointer(addresses, 0, tensors, tensor, W, ALIGNED)
    grad = pointer(addresses, 1, tensors, tensor, G, ALIGNED)
    state_m = pointer(addresses, 2, tensors, tensor, S, ALIGNED)
    state_v = pointer(addresses, 3, tensors, tensor, S, ALIGNED)
    source = weight
    if MASTERS:
        source = pointer(addresses, 4, tensors, tensor, tl.float32, ALIGNED)
    factor = 1.0
    if scale is not None:
        factor = tl.load(scale)
    if (factor != factor) | (tl.abs(factor) == float("inf")):
        size = size * 0
    number = tl.load(numbers + tensor).to(tl.uint32)
    seed = _mix(_mix(key.to(tl.uint32, bitcast=True) + number * 0x9E3779B1) + chunk.to(tl.uint32))
    start = chunk.to(tl.int64) * CHUNK
    left = tl.minimum(size - start, CHUNK).to(tl.int32)
    for first in tl.range(0, left, BLOCK, num_stages=STAGES):
        place = first + tl.arange(0, BLOCK)
        at = start + place
        mask = at < size
        g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32) * factor
        m = tl.load(state_m + at, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(state_v + at, mask=mask, other=0.0).to(tl.float32)
        w = tl.load(source + at, mask=mask, other=0.0).to(tl.float32)
        m += (g - m) * (1.0 - beta1)
        v = v * beta2 + g * g * (1.0 - beta2)
        w = w * kept - step_size * (m / (tl.sqrt(v) * root + eps))
        bits = _mix(seed + place.to(tl.uint32) * 0x85EBCA6B)
        more = _mix(bits + 0x9E3779B9)
        tl.store(state_m + at, _rounded(m, bits >> 16, S), mask=mask)
        tl.store(state_v + at, _rounded(v, more & 0xFFFF, S), mask=mask)
        if MASTERS:
            tl.store(source + at, w, mask=mask)
            tl.store(weight + at, w.to(W), mask=mask)
        else:
            tl.store(weight + at, _rounded(w, bits & 0xFFFF, W), mask=mask)


def adamw(state: State, step: Step, scale: Tensor | None = None, impl: Impl = "auto") -> None:
    """Update weights, states and masters in place. `scale`: float32, one element, multiplies the gradients."""
    require(len(state.weights) > 0, "weights", "at least one tensor", "none")
    check("weights[0]", state.weights[0], dtypes=FLOATS)
    check("grads[0]", state.grads[0], dtypes=FLOATS)
    check("m[0]", state.m[0], dtypes=(torch.float32, torch.bfloat16))
    check("v[0]", state.v[0], dtypes=(state.m[0].dtype,))
    if state.masters is not None:
        check("masters[0]", state.masters[0], dtypes=(torch.float32,))
    if scale is not None:
        check("scale", scale, dtypes=(torch.float32,), beside=state.weights[0])
        require(scale.numel() == 1, "scale", "one element", tuple(scale.shape))
    offers = {"triton": needs_cuda(state.weights[0]), "reference": None}
    if choose("adamw", impl, offers).impl == "reference":
        check_roles(state.roles())
        adamw_reference(state, step, scale)
    else:
        _launch(state, step, scale)


def _launch(state: State, step: Step, scale: Tensor | None) -> None:
    dtypes = [role[0].dtype for role in (state.weights, state.grads, state.m)]
    default = WIDE if state.masters is not None or torch.float32 in dtypes else NARROW
    how = tuned("adamw", key_of(dtypes, state.masters is not None), default)
    weight, grad, states = (TYPES[dtype] for dtype in dtypes)
    for table in tables(**state.roles()):
        launch(
            _adamw_kernel, table.chunks,
            table.addresses, table.sizes, table.numbers, table.tensor_of, table.chunk_of, scale,
            len(table.sizes), step.key(), *step.coefficients(),
            W=weight, G=grad, S=states, MASTERS=state.masters is not None, ALIGNED=table.aligned,
            CHUNK=CHUNK, BLOCK=how["block"], STAGES=how["stages"], num_warps=how["warps"],
        )  # fmt: skip


def key_of(dtypes: Sequence[torch.dtype], masters: bool) -> str:
    return ",".join(short(dtype) for dtype in dtypes) + ",masters" * masters


def cost(elements: int, weight: int, grad: int, state: int, masters: bool) -> Cost:
    """The numbers are bytes per element."""
    moved = grad + 4 * state + (8 + weight if masters else 2 * weight)
    return Cost(12 * elements, moved * elements)
