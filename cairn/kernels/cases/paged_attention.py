"""Benchmark cases of paged attention: decode steps, prompt chunks after a prefix, and mixed steps.

Data are random; pages are handed out in random order, as a cache looks after a while. The anchors compute the same
from keys that lie side by side: cuDNN for decode, our own attention for chunks. They have it easier.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.cases.paged_variants import VARIANTS, tuned_variants
from cairn.kernels.dispatch import Impl
from cairn.kernels.kernel import Case, Cost, Prepared
from cairn.kernels.paged import paged_decode, paged_prefill
from cairn.kernels.paged.paged_attention import (
    FP8,
    checked,
    cost,
    paged_attention,
    paged_attention_reference,
)
from cairn.kernels.paged.paged_parts import Workspace, lasting_workspace
from cairn.kernels.paged.paged_tiles import Paged
from cairn.kernels.tuned import Tuning

__all__ = ["VARIANTS", "cases", "tuned_variants", "tuning"]
KERNEL = "cairn.kernels.paged.paged_attention"


class Shape(NamedTuple):
    queries: Sequence[int]
    lengths: Sequence[int]
    heads: int = 32
    kv_heads: int = 8
    columns: int = 128
    page: int = 16
    fp8: bool = False
    by_head: bool = False  # a page keeps the tokens of each head together

    def cost(self) -> Cost:
        return cost(
            self.queries,
            self.lengths,
            self.heads,
            self.kv_heads,
            self.columns,
            bytes_kv=2 - self.fp8,
        )


def random_call(shape: Shape, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Paged:
    """A batch whose pages lie anywhere in a cache that is a little larger than needed."""
    columns = max(1, *(-(-length // shape.page) for length in shape.lengths))
    sequences = len(shape.lengths)
    pages = sequences * columns + 8
    sizes = (shape.kv_heads, shape.page) if shape.by_head else (shape.page, shape.kv_heads)
    cache = torch.randn(2, pages, *sizes, shape.columns, device=device, dtype=dtype)
    scales = [torch.full((1,), 0.5, device=device) if shape.fp8 else None for _ in range(2)]
    cache = cache.to(FP8) if shape.fp8 else cache
    cache = cache.transpose(2, 3) if shape.by_head else cache
    tables = (
        torch.randperm(pages, device=device)[: sequences * columns].view(sequences, columns).int()
    )
    q_THC = torch.randn(sum(shape.queries), shape.heads, shape.columns, device=device, dtype=dtype)
    lengths = torch.tensor(shape.lengths, dtype=torch.int32, device=device)
    counts = torch.tensor([0, *shape.queries], device=device)
    starts = None if max(shape.queries) == 1 == min(shape.queries) else counts.cumsum(0).int()
    return checked(
        q_THC, cache[0], cache[1], tables, lengths, starts, max(shape.queries),
        k_scale=scales[0], v_scale=scales[1],
    )  # fmt: skip


def run(call: Paged, workspace: Workspace | None = None, impl: Impl = "auto") -> Tensor:
    return paged_attention(
        call.q_THC, call.cache_k, call.cache_v, call.block_tables, call.lengths, call.starts, max_query=call.max_query,
        k_scale=call.k_scale, v_scale=call.v_scale, out=call.out_THC, workspace=workspace,
        impl=impl,
    )  # fmt: skip


def _prepare(
    shape: Shape, anchor: Callable[[Shape], dict[str, Callable[[], object]]], impl: Impl = "auto"
) -> Prepared:
    call = random_call(shape)
    workspace = lasting_workspace(call.q_THC.device)

    def error() -> float:
        poison(call.out_THC)
        return relative_error(run(call, workspace, impl), paged_attention_reference(call)[0])

    return Prepared(lambda: run(call, workspace, impl), anchor(shape), error)


def _contiguous_decode(shape: Shape) -> dict[str, Callable[[], object]]:
    """Equal lengths, keys side by side, in the layout that cuDNN likes best."""
    sizes = (len(shape.lengths), shape.kv_heads, shape.lengths[0], shape.columns)
    k, v = (torch.randn(sizes, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q = torch.randn(sizes[0], shape.heads, 1, shape.columns, device="cuda", dtype=torch.bfloat16)

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return {"cuDNN, contiguous": cudnn}


def _contiguous_prefill(shape: Shape) -> dict[str, Callable[[], object]]:
    """Our own attention over the same numbers of queries and keys."""
    from cairn.kernels.attention.attention import attention

    q = torch.randn(
        sum(shape.queries), shape.heads, shape.columns, device="cuda", dtype=torch.bfloat16
    )
    k, v = (
        torch.randn(
            sum(shape.lengths), shape.kv_heads, shape.columns, device="cuda", dtype=torch.bfloat16
        )
        for _ in range(2)
    )
    bounds = [
        torch.tensor([0, *counts], device="cuda").cumsum(0).int()
        for counts in (shape.queries, shape.lengths)
    ]
    longest = dict(max_length=max(shape.queries), max_length_k=max(shape.lengths))
    return {
        "ours, contiguous": lambda: attention(q, k, v, bounds[0], cu_seqlens_k=bounds[1], **longest)
    }


def _nothing(shape: Shape) -> dict[str, Callable[[], object]]:
    return {}


def _decode_shapes() -> Iterator[tuple[str, Shape]]:
    def one(batch: int, length: int, **rest: int | bool) -> Shape:
        return Shape([1] * batch, [length] * batch, **rest)  # type: ignore[arg-type]

    for heads in (32, 16):
        for batch, length, page in (
            (1, 8192, 16), (32, 1024, 16), (32, 8192, 16), (32, 8192, 64), (128, 4096, 16), (256, 1024, 16),
            (256, 1024, 64), (256, 8192, 64),
        ):  # fmt: skip
            yield (
                f"{heads}/8 {batch} x {length} page {page}",
                one(batch, length, page=page, heads=heads),
            )
    for page in (16, 64):
        yield f"32/8 128 x 4096 page {page} by head", one(128, 4096, page=page, by_head=True)
    yield "32/8 128 x 4096 page 64 fp8", one(128, 4096, page=64, fp8=True)


def _ragged() -> Shape:
    """Few long and many short ones, with padding, as in a server."""
    lengths = [32768, 16384] + [512 + 61 * i for i in range(126)] + [0] * 32
    return Shape([1] * len(lengths), lengths)


def cases() -> Iterator[Case]:
    for name, shape in _decode_shapes():
        dtype = "fp8" if shape.fp8 else "bf16"
        anchor = _nothing if shape.fp8 or shape.by_head else _contiguous_decode
        yield _case("paged_decode", name, shape, anchor, dtype, graph=True)
    yield _case("paged_decode", "32/8 ragged 1-32k page 16", _ragged(), _nothing, graph=True)
    for page in (16, 64, 128, 256):
        shape = Shape([2048], [10240], page=page)
        yield _case(
            "paged_prefill", f"32/8 2048 behind 8192 page {page}", shape, _contiguous_prefill
        )
    shape = Shape([512] * 8, [512] * 8, page=64)
    yield _case("paged_prefill", "32/8 8 x 512 page 64", shape, _contiguous_prefill, graph=True)
    mixed = Shape([1] * 64 + [2048], [4096] * 64 + [10240], page=64)
    yield _case("paged_mixed", "32/8 64 x 1 behind 4096, 2048 behind 8192", mixed, _nothing)


def _case(
    kernel: str,
    name: str,
    shape: Shape,
    anchor: Callable[[Shape], dict[str, Callable[[], object]]],
    dtype: str = "bf16",
    graph: bool = False,
    impl: Impl = "auto",
) -> Case:
    return Case(
        kernel, name, dtype, shape.cost(), lambda: _prepare(shape, anchor, impl), graph=graph
    )


def tuning() -> Iterator[Tuning]:
    """Tuning with one representative shape for each key."""
    for page in (16, 64, 256):
        for cache in (torch.bfloat16, FP8):
            shape = Shape([1] * 64, [4096] * 64, page=page, fp8=cache == FP8)
            plans = [plan._asdict() for plan in paged_decode.CANDIDATES]
            yield Tuning(paged_decode.key(128, page, cache, 16), plans, _ready(shape))
        able = [plan for plan in paged_prefill.CANDIDATES if page % plan.block == 0 or not plan.tma]
        fitting = [plan._asdict() for plan in (*able, *paged_prefill.GLUON_CANDIDATES)]
        shape = Shape([2048], [10240], page=page)
        yield Tuning(paged_prefill.key(128, page, torch.bfloat16), fitting, _ready(shape))


def _ready(shape: Shape) -> Callable[[], Callable[[], object]]:
    def prepare() -> Callable[[], object]:
        call = random_call(shape)
        return lambda: run(call)

    return prepare


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
