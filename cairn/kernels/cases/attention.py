"""Benchmark and tuning cases of attention: 16k tokens as few long or many short sequences, forward and backward.

Equal lengths beside cuDNN and torch's flash attention, which get their tensors in the order they like best; a ragged
batch beside torch's attention for ragged batches. Each implementation of ours has rows of its own, so that the table
also shows those that are not the first choice. The truth comes from float32, one head at a time.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.attention import (
    attention_backward,
    attention_forward,
    attention_gluon,
    attention_gluon_backward,
)
from cairn.kernels.attention.attention import attention, attention_gradients, first_key
from cairn.kernels.attention.attention_problem import checked_problem, cost
from cairn.kernels.cases.attention_variants import VARIANTS
from cairn.kernels.dispatch import Impl
from cairn.kernels.kernel import Case, Prepared
from cairn.kernels.tuned import Tuning

__all__ = ["VARIANTS", "cases", "tuning"]
KERNEL = "cairn.kernels.attention.attention"
TOKENS = 16384
DOCUMENTS = (5000, 3000, 2111, 2999, 1800, 974, 500)  # as many tokens again, ragged
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "torch flash": SDPBackend.FLASH_ATTENTION}


class Shape(NamedTuple):
    lengths: Sequence[int]
    heads: int = 32
    kv_heads: int = 8
    width: int = 128
    causal: bool = True

    @property
    def equal(self) -> bool:
        return len(set(self.lengths)) == 1

    def __str__(self) -> str:
        which = (
            f"{len(self.lengths)} x {self.lengths[0]}"
            if self.equal
            else f"{len(self.lengths)} documents"
        )
        full = "" if self.causal else ", full"
        return f"{which}, heads {self.heads}/{self.kv_heads}, D{self.width}{full}"


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    cu_seqlens: Tensor | None


def equally(
    length: int, heads: int = 32, kv_heads: int = 8, width: int = 128, causal: bool = True
) -> Shape:
    return Shape([length] * (TOKENS // length), heads, kv_heads, width, causal)


def cases() -> Iterator[Case]:
    lengths = (1024, 2048, 4096, 8192, 16384)
    for heads, kv_heads in ((32, 8), (16, 16)):
        for length in lengths:
            yield _case("attention_forward", equally(length, heads, kv_heads))
    yield _case("attention_forward", equally(4096, width=64))
    yield _case("attention_forward", equally(4096, causal=False))
    yield _case("attention_forward", Shape(DOCUMENTS))
    for impl in OWN:
        for length in (1024, 4096, 8192, 16384):
            yield _case(f"attention_forward_{impl}", equally(length), impl)
        yield _case(f"attention_forward_{impl}", Shape(DOCUMENTS), impl)
    for heads, kv_heads in ((32, 8), (16, 16)):
        for length in lengths:
            yield _case("attention_backward", equally(length, heads, kv_heads))
    yield _case("attention_backward", equally(4096, width=64))
    yield _case("attention_backward", Shape(DOCUMENTS))
    for impl in OWN:
        for length in (1024, 4096, 8192, 16384):
            yield _case(f"attention_backward_{impl}", equally(length), impl)
        yield _case(f"attention_backward_{impl}", Shape(DOCUMENTS), impl)


OWN: tuple[Impl, ...] = ("gluon", "triton")


def _case(kernel: str, shape: Shape, impl: Impl = "auto") -> Case:
    backward = kernel.startswith("attention_backward")
    prepare = functools.partial(_backward if backward else _forward, shape, impl)
    floor = cost(
        shape.lengths,
        shape.heads,
        shape.kv_heads,
        shape.width,
        causal=shape.causal,
        backward=backward,
    )
    return Case(kernel, str(shape), "bf16", floor, prepare)


def random_inputs(
    shape: Shape, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> Inputs:
    tokens = sum(shape.lengths)
    q, dout = torch.randn(2, tokens, shape.heads, shape.width, device=device, dtype=dtype)
    k, v = torch.randn(2, tokens, shape.kv_heads, shape.width, device=device, dtype=dtype)
    bounds = [0, *itertools.accumulate(shape.lengths)]
    cu = None if shape.equal else torch.tensor(bounds, dtype=torch.int32, device=device)
    return Inputs(q, k, v, dout, cu)


def _forward(shape: Shape, impl: Impl) -> Prepared:
    x = random_inputs(shape)
    ours = functools.partial(
        attention,
        x.q,
        x.k,
        x.v,
        x.cu_seqlens,
        max_length=max(shape.lengths),
        causal=shape.causal,
        impl=impl,
    )

    def error() -> float:
        out = torch.empty_like(x.q)
        poison(out)
        attention(
            x.q,
            x.k,
            x.v,
            x.cu_seqlens,
            max_length=max(shape.lengths),
            causal=shape.causal,
            impl=impl,
            out=out,
        )
        return relative_error(out, exact(x, shape, gradients=False)[0])

    if not shape.equal:
        ragged = functools.partial(ours, impl="torch")
        return Prepared(ours, {"torch flash, ragged": ragged}, error)
    q, k, v = (_batches(t, shape) for t in (x.q, x.k, x.v))
    anchors = {
        name: functools.partial(_sdpa, backend, q, k, v, shape.causal)
        for name, backend in BACKENDS.items()
    }
    return Prepared(ours, anchors, error)


def _backward(shape: Shape, impl: Impl) -> Prepared:
    x = random_inputs(shape)
    longest = max(shape.lengths)
    out, lse = attention(
        x.q, x.k, x.v, x.cu_seqlens, max_length=longest, causal=shape.causal, return_lse=True
    )
    problem = checked_problem(
        x.q, x.k, x.v, x.cu_seqlens, None, longest, None, shape.causal, 0, 0.0, None
    )
    ours = functools.partial(
        attention_gradients, x.dout, x.q, x.k, x.v, None, out, lse, problem, impl=impl
    )

    def error() -> float:
        return relative_error(ours()[:3], exact(x, shape)[1:])

    if not shape.equal:
        return Prepared(ours, {}, error)
    anchors = {name: _sdpa_backward(backend, x, shape) for name, backend in BACKENDS.items()}
    return Prepared(ours, anchors, error)


def _batches(x_THC: Tensor, shape: Shape) -> Tensor:
    """[B, heads, S, C], contiguous."""
    return x_THC.unflatten(0, (len(shape.lengths), -1)).transpose(1, 2).contiguous()


def _sdpa(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def _sdpa_backward(backend: SDPBackend, x: Inputs, shape: Shape) -> Callable[[], object]:
    """The graph is built at the first call, so that a backend that cannot run fails as an anchor."""
    q, k, v = (_batches(t, shape).requires_grad_() for t in (x.q, x.k, x.v))
    dout = _batches(x.dout, shape)

    @functools.cache
    def out() -> Tensor:
        return _sdpa(backend, q, k, v, shape.causal)

    return lambda: torch.autograd.grad(out(), (q, k, v), dout, retain_graph=True)


def exact(x: Inputs, shape: Shape, gradients: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, dq, dk, dv in float32, by the formulas; a head's scores at a time."""
    out, dq, dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (x.q, x.q, x.k, x.v))
    scale, group, start = shape.width**-0.5, shape.heads // shape.kv_heads, 0
    for length in shape.lengths:
        rows = slice(start, start + length)
        start += length
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.q.device).triu(1)
        for head in range(shape.heads):
            kv_head = head // group
            q, dout = x.q[rows, head].float(), x.dout[rows, head].float()
            k, v = x.k[rows, kv_head].float(), x.v[rows, kv_head].float()
            scores = q @ k.T * scale
            if shape.causal:
                scores.masked_fill_(hidden, float("-inf"))
            weights = scores.softmax(-1)
            out[rows, head] = weights @ v
            if gradients:
                dv[rows, kv_head] += weights.T @ dout
                slopes = dout @ v.T
                slopes = weights * (slopes - (slopes * weights).sum(-1, keepdim=True)) * scale
                dq[rows, head] = slopes @ k
                dk[rows, kv_head] += slopes.T @ q
    return out, dq, dk, dv


def tuning() -> Iterator[Tuning]:
    """Each of our kernels by itself; then which implementation is the first choice for equal lengths."""
    lengths = (1024, 2048, 4096, 8192, 16384)
    for width, length in [*((128, n) for n in lengths), (64, 4096)]:
        shape, dtype = equally(length, width=width), torch.bfloat16
        yield Tuning(
            attention_gluon.gluon_key(width, True, length),
            attention_gluon.GLUON_CANDIDATES,
            lambda shape=shape: _forward(shape, "gluon").ours,
        )
        yield Tuning(
            attention_forward.forward_key(width, dtype, True, length),
            attention_forward.FORWARD_CANDIDATES,
            lambda shape=shape: _forward(shape, "triton").ours,
        )
        yield Tuning(
            attention_backward.backward_key(width, dtype, True, length, True),
            attention_backward.backward_candidates(width),
            lambda shape=shape: _backward(shape, "triton").ours,
        )
        yield Tuning(
            attention_gluon_backward.backward_key(width, True, length),
            attention_gluon_backward.BACKWARD_CANDIDATES,
            lambda shape=shape: _backward(shape, "gluon").ours,
        )
    for length in lengths:
        shape = equally(length)
        yield Tuning(first_key("forward", 128, length), [dict(impl="gluon"), dict(impl="torch")],
                     lambda shape=shape: _forward(shape, "auto").ours)  # fmt: skip
        backends = [dict(impl=impl) for impl in ("torch", *OWN)]
        yield Tuning(first_key("backward", 128, length), backends,
                     lambda shape=shape: _backward(shape, "auto").ours)  # fmt: skip


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
