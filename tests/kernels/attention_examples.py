"""Attention problems for the tests, in the interpreter and on a GPU, and the one way in which both check them."""

import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.attention.attention import attention, attention_reference


class Example(NamedTuple):
    lengths: tuple[int, ...]
    keys: tuple[int, ...] | None = None  # where they are not as many as the queries
    heads: int = 2
    kv_heads: int = 1
    width: int = 64
    behind: int = 0  # rows after the last sequence
    sinks: bool = False
    fused: bool = False  # q, k and v are slices of one tensor
    rules: Mapping = MappingProxyType({})

    def __str__(self) -> str:
        set_fields = {
            name: value
            for name, value in self._asdict().items()
            if value != self._field_defaults.get(name)
        }
        return ",".join(f"{name}={value}" for name, value in set_fields.items()).replace(" ", "")


def bounds(lengths: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def tensors(example: Example, dtype: torch.dtype, device: str) -> list[Tensor]:
    """q, k, v and sinks; what lies behind the last sequence is no number."""
    ends = sum(example.lengths), sum(example.keys or example.lengths)
    heads = (example.heads, example.kv_heads, example.kv_heads)
    if example.fused:
        fused = torch.randn(ends[0] + example.behind, sum(heads), example.width, device=device).to(
            dtype
        )
        q, k, v = fused.split(heads, dim=1)
    else:
        q, k, v = (
            torch.randn(end + example.behind, count, example.width, device=device).to(dtype)
            for end, count in zip((ends[0], ends[1], ends[1]), heads, strict=True)
        )
    for x, end in ((q, ends[0]), (k, ends[1]), (v, ends[1])):
        x[end:] = torch.nan
    return [q, k, v, *([torch.randn(example.heads, device=device)] if example.sinks else [])]


def arguments(example: Example, device: str) -> dict:
    more = (
        dict(cu_seqlens_k=bounds(example.keys, device), max_length_k=max(example.keys))
        if example.keys
        else {}
    )
    return dict(
        cu_seqlens=bounds(example.lengths, device),
        max_length=max(example.lengths),
        **more,
        **example.rules,
    )


def check_forward(
    example: Example, dtype: torch.dtype, device: str, impl: str, tolerance: float
) -> None:
    q, k, v, *sinks = tensors(example, dtype, device)
    named = arguments(example, device)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    poison(out)
    _, lse = attention(
        q, k, v, **named, sinks_H=sinks[0] if sinks else None, return_lse=True, out=out, impl=impl
    )
    exact, exact_lse = attention_reference(
        *(x.double().nan_to_num() for x in (q, k, v)),
        **named,
        sinks_H=sinks[0].double() if sinks else None,
    )
    end = sum(example.lengths)
    assert relative_error(out[:end], exact[:end]) < tolerance
    assert not out[end:].any()
    saw = exact_lse.isfinite()
    assert torch.equal(lse.isfinite(), saw)
    assert relative_error(lse[saw], exact_lse[saw]) < max(1e-5, tolerance / 10)


def check_gradients(
    example: Example, dtype: torch.dtype, device: str, impl: str, tolerance: float
) -> None:
    """Of out and of lse, by autograd; the truth is the reference's in float64."""
    inputs = [x.nan_to_num().requires_grad_() for x in tensors(example, dtype, device)]
    named = arguments(example, device)
    wide = [x.detach().double().requires_grad_() for x in inputs]
    exact, exact_lse = attention_reference(
        *wide[:3], **named, sinks_H=wide[3] if example.sinks else None
    )
    out, lse = attention(
        *inputs[:3],
        **named,
        sinks_H=inputs[3] if example.sinks else None,
        return_lse=True,
        impl=impl,
    )
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    saw = exact_lse.isfinite()
    ours = torch.autograd.grad([out, lse[saw]], inputs, [dout, dlse[saw]])
    truth = torch.autograd.grad([exact, exact_lse[saw]], wide, [dout.double(), dlse[saw].double()])
    assert relative_error(ours, truth) < tolerance


def integers(
    tokens: int, heads: int, width: int, device: str, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Small enough that sums of thousands are exact in float32."""
    return torch.randint(-4, 5, (tokens, heads, width), device=device).to(dtype)


def check_exactness(
    sequences: int, length: int, width: int, impl: str, device: str = "cuda"
) -> None:
    """Queries of zero weigh all keys alike, by a power of two: values' means and their gradients must be exact.

    The weights are a product's left operand in registers, where some versions of ptxas are wrong.
    """
    assert length & (length - 1) == 0
    tokens = sequences * length
    q = torch.zeros(tokens, 4, width, device=device, dtype=torch.bfloat16).requires_grad_()
    k, v = (integers(tokens, 2, width, device).requires_grad_() for _ in range(2))
    dout = integers(tokens, 4, width, device)
    out = attention(q, k, v, None, max_length=length, causal=False, impl=impl)
    means = v.double().unflatten(0, (sequences, length)).mean(1).repeat_interleave(2, dim=1)
    assert torch.equal(out, means.to(torch.bfloat16).repeat_interleave(length, dim=0))
    [dv] = torch.autograd.grad(out, [v], dout)
    sums = dout.double().unflatten(0, (sequences, length)).mean(1).unflatten(1, (2, 2)).sum(2)
    assert torch.equal(dv, sums.to(torch.bfloat16).repeat_interleave(length, dim=0))
