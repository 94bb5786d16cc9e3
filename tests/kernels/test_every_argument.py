"""Every tensor that a public function takes, wrong in every way: it is named in a ValueError, or it is no mistake.

    good call -> one tensor with another type | shape | stride | device -> ValueError, or a result

Never another error, and not on a GPU alone: the reference is as strict about types, shapes and devices as the kernels
are. That no function is left out is checked, too. Values are not looked at: that would wait for a GPU.
"""

import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.kernels.adapter.lora_slopes import lora_slopes
from cairn.kernels.attention.attention import attention
from cairn.kernels.attention.merge_state import State, merge_state
from cairn.kernels.cases.packed_matmul import random_packed
from cairn.kernels.cases.weight_only import FORMS, OTHERS, random_rows
from cairn.kernels.experts.combine import combine
from cairn.kernels.experts.combine_norm import (
    Choices,
    combine_add_rmsnorm,
    combine_add_rmsnorm_fp8,
)
from cairn.kernels.experts.gate_backward import gate_backward
from cairn.kernels.experts.grouped_matmul import (
    SWIGLU,
    grouped_matmul,
    grouped_parts,
)
from cairn.kernels.experts.route import Routing, route
from cairn.kernels.experts.sort_pairs import FewPairs, sort_pairs
from cairn.kernels.layer.activation import gated_activation, gated_activation_fp8, geglu
from cairn.kernels.layer.activation_backward import gated_activation_backward
from cairn.kernels.layer.embedding import embedding, embedding_backward
from cairn.kernels.layer.rope import Pages, rope, rope_table
from cairn.kernels.layer.rope_backward import Heads, rope_backward
from cairn.kernels.loss.cross_entropy import cross_entropy, cross_entropy_
from cairn.kernels.loss.linear_cross_entropy import linear_cross_entropy
from cairn.kernels.matmul.matmul import matmul
from cairn.kernels.matmul.matmul_fp8 import matmul_fp8
from cairn.kernels.matmul.packed_matmul import packed_matmul, packed_parts
from cairn.kernels.matmul.packed_weights import dequantize_packed
from cairn.kernels.matmul.skinny_fp8 import skinny_fp8, skinny_fp8_parts
from cairn.kernels.matmul.skinny_matmul import skinny_matmul, skinny_parts
from cairn.kernels.matmul.weight_only import (
    dequantize_rows,
    weight_only_matmul,
    weight_only_parts,
)
from cairn.kernels.norm.join_norm import Parts, join_add_rmsnorm, join_add_rmsnorm_fp8
from cairn.kernels.norm.layernorm import add_layernorm, layernorm
from cairn.kernels.norm.rmsnorm import (
    add_rmsnorm,
    add_rmsnorm_both,
    add_rmsnorm_fp8,
    rmsnorm,
    rmsnorm_fp8,
    rmsnorm_with_rstd,
)
from cairn.kernels.norm.rmsnorm_backward import rmsnorm_backward
from cairn.kernels.optim.adamw import State as Moments
from cairn.kernels.optim.adamw import Step, adamw
from cairn.kernels.optim.grad_norm import clip_scale, square_sum
from cairn.kernels.paged import cascade
from cairn.kernels.paged.kv_blocks import copy_blocks, swap_blocks
from cairn.kernels.paged.kv_write import rope_write
from cairn.kernels.paged.latent_attention import latent_attention
from cairn.kernels.paged.paged_attention import paged_attention
from cairn.kernels.paged.step_inputs import decode_step, keep_tokens, step_inputs
from cairn.kernels.quantize.nf4 import dequantize_nf4, quantize_nf4
from cairn.kernels.quantize.quantize import Quantized, dequantize, quantize, quantize_reference
from cairn.kernels.quantize.quantize_tensor import quantize_tensor
from cairn.kernels.quantize.quantize_transposed import quantize_transposed
from cairn.kernels.sampling.accept_tokens import accept_tokens, random_draws
from cairn.kernels.sampling.draft_ngrams import draft_ngrams, random_texts
from cairn.kernels.sampling.logprobs import LogProbs, logprobs
from cairn.kernels.sampling.penalties import count, penalize, random_penalties
from cairn.kernels.sampling.sampling import random_batch, sample
from cairn.kernels.sampling.synthetic_draws import random_rates, synthetic_draws
from cairn.kernels.tooling import catalogue

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
WRONG_TYPES = (torch.float64, torch.int16, torch.complex64, torch.bool)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def seeded(make: Any, *arguments: Any, **options: Any) -> Any:
    """The same in every run, and nobody else's random numbers change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make(*arguments, **options)


def ids(*numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, dtype=dtype)


def heads() -> Heads:
    return Heads(2, 1, random(64), random(64))


def turning() -> dict[str, Any]:
    table = rope_table(torch.linspace(0.1, 1.0, 32), 16)
    return dict(qkv=random(5, 256), heads=heads(), table=table, positions=ids(0, 3, 1, 15, 2))


def paged(**more: Any) -> dict[str, Any]:
    pages = dict(cache_k=random(4, 16, 1, 64), cache_v=random(4, 16, 1, 64))
    tables = ids(0, 1, 2, 3, 1, 0).view(3, 2)
    rest = dict(block_tables=tables, lengths=ids(20, 5, 1), max_query=1)
    return dict(q_THC=random(3, 2, 64)) | pages | rest | more


def prefix() -> cascade.Cascade:
    tables = ids(0, 1, 0, 3, 0, 2).view(3, 2)
    return cascade.split_tables(tables, ids(20, 18, 17), ids(16), 16)


def moments() -> Moments:
    return Moments(
        *([random(8, 8), random(5)] for _ in range(3)), [torch.ones(8, 8), torch.ones(5)]
    )


def step() -> dict[str, Any]:
    decided, state, _, inputs = seeded(decode_step, 3, 20, 16, "cpu")
    return dict(decided=decided, state=state, page_size=16, inputs=inputs)


def quantized(x: Tensor) -> Quantized:
    return quantize_reference(x)


B, T = (
    seeded(random_batch, 3, 100, torch.float32, device="cpu"),
    ids(1, 2, -100, 39, 0, dtype=torch.int64),
)
MORE = dict(out=torch.empty(6, 32), eps=1e-6)
NORM = dict(x=random(6, 32), weight=random(32))
ROWS = dict(gate=random(6, 32), up=random(6, 32))
PRODUCT = dict(bias_N=random(32), residual_MN=random(8, 32, dtype=BF16))
PAGES = Pages(ids(3, -1, 7, 20, 60), random(4, 16, 1, 64), random(4, 16, 1, 64))
SCALES = dict(k_scale=torch.ones(1), v_scale=torch.ones(1))
QKV = dict(q_THC=random(10, 2, 64), k_TKC=random(10, 1, 64), v_TKC=random(10, 1, 64))
CHOSEN = ids(0, 2, 1, 2, 0, 1).view(3, 2)
EXPERTS = dict(w_ENK=random(3, 8, 16), pairs=sort_pairs(CHOSEN, 3))
CALLS: list[tuple[Any, dict[str, Any]]] = [
    (gated_activation, ROWS | dict(out=torch.empty(6, 32))),
    (geglu, dict(gate=random(6, 32))),
    (gated_activation_fp8, ROWS | dict(out=quantized(random(6, 32)))),
    (gated_activation_backward, ROWS | dict(grad=random(6, 32), y=torch.empty(6, 32))),
    (rmsnorm, NORM | MORE),
    (add_rmsnorm, NORM | MORE | dict(residual=random(6, 32), residual_out=torch.empty(6, 32))),
    (rmsnorm_with_rstd, NORM | dict(residual=random(6, 32))),
    (rmsnorm_fp8, NORM | dict(out=quantized(random(6, 32)))),
    (add_rmsnorm_fp8, NORM | dict(residual=random(6, 32), residual_out=torch.empty(6, 32))),
    (add_rmsnorm_both, NORM | dict(residual=random(6, 32), residual_out=torch.empty(6, 32))),
    (
        rmsnorm_backward,
        NORM
        | dict(grad=random(6, 32), rstd=torch.ones(6), grad_residual=random(6, 32))
        | dict(out=torch.empty(6, 32), y=torch.empty(6, 32)),
    ),
    (layernorm, NORM | MORE | dict(bias=random(32))),
    (
        add_layernorm,
        NORM | MORE | dict(bias=random(32), residual=random(6, 32), residual_out=random(6, 32)),
    ),
    (
        join_add_rmsnorm,
        dict(parts=Parts(random(3, 5, 64)), residual=random(5, 64), weight=random(64)),
    ),
    (
        join_add_rmsnorm_fp8,
        dict(parts=Parts(random(3, 5, 64)), residual=random(5, 64), weight=random(64)),
    ),
    (embedding, dict(tokens=ids(1, 2, 19), weight=random(20, 32), out=torch.empty(3, 32))),
    (
        embedding_backward,
        dict(grad=random(3, 32), tokens=ids(1, 2, 19), rows=20, dtype=BF16, into=random(20, 32)),
    ),
    (quantize, dict(x=random(6, 32), out=quantized(random(6, 32)))),
    (dequantize, dict(quantized=quantized(random(6, 32)), out=torch.empty(6, 32, dtype=BF16))),
    (
        lora_slopes,
        dict(
            g_MN=torch.ones(5, 12),
            b_NR=torch.ones(12, 16),
            h_MR=torch.ones(5, 32),
            part_rows=(8, 4),
            scale=2.0,
        ),
    ),
    (dequantize_nf4, dict(nf4=quantize_nf4(torch.ones(6, 32)), dtype=BF16)),
    (quantize_tensor, dict(x=random(6, 32), scale=torch.ones(1))),
    (quantize_tensor, dict(x=random(6, 32))),
    (quantize_transposed, dict(x=random(16, 32), both=True)),
    (rope, turning()),
    (rope_table, dict(frequencies=torch.linspace(0.1, 1.0, 32), length=16)),
    (
        rope_backward,
        turning() | dict(dq=random(5, 2, 64), dk=random(5, 1, 64), dv=random(5, 1, 64)),
    ),
    (
        rope_write,
        turning() | dict(pages=PAGES, out=torch.empty(5, 2, 64), k_out=torch.empty(5, 1, 64)),
    ),
    (
        rope_write,
        turning()
        | dict(pages=Pages(*(x.to(FP8) if x.ndim > 1 else x for x in PAGES[:3]), **SCALES)),
    ),
    (
        attention,
        QKV
        | dict(cu_seqlens=ids(0, 3, 10), max_length=7, window=3, softcap=5.0, return_lse=True)
        | dict(sinks_H=random(2), out=torch.empty(10, 2, 64)),
    ),
    (attention, QKV | dict(cu_seqlens=None, max_length=5)),
    (
        attention,
        QKV
        | dict(cu_seqlens=ids(0, 3, 10), max_length=7, cu_seqlens_k=ids(0, 1, 10), max_length_k=9),
    ),
    (
        paged_attention,
        paged(window=4, sinks_H=random(2), out=torch.empty(3, 2, 64), lse=torch.empty(3, 2)),
    ),
    (paged_attention, paged(q_THC=random(9, 2, 64), cu_seqlens_q=ids(0, 3, 8, 9), max_query=5)),
    (
        latent_attention,
        dict(
            q_THE=random(9, 2, 24),
            cache=random(4, 16, 1, 24),
            block_tables=ids(0, 1, 2, 3, 1, 0).view(3, 2),
            lengths=ids(20, 5, 1),
            cu_seqlens_q=ids(0, 3, 8, 9),
            rank=16,
            max_query=5,
            scale=0.3,
        ),
    ),
    (
        paged_attention,
        paged(q_THC=random(3, 2, 64, dtype=BF16), **SCALES)
        | {name: random(4, 16, 1, 64).to(FP8) for name in ("cache_k", "cache_v")},
    ),
    (
        cascade.split_tables,
        dict(tables_BP=ids(0, 1, 0, 3).view(2, 2), lengths_B=ids(20, 18))
        | dict(shared_1=ids(16), page_size=16),
    ),
    (
        cascade.cascade_attention,
        dict(q_THC=random(3, 2, 64), cascade=prefix())
        | {name: random(4, 16, 1, 64) for name in ("cache_k", "cache_v")},
    ),
    (
        merge_state,
        {name: State(random(5, 2, 64), random(5, 2)) for name in ("a", "b", "out")},
    ),
    (matmul, dict(a_MK=random(8, 64, dtype=BF16), b_NK=random(32, 64, dtype=BF16)) | PRODUCT),
    (matmul, dict(a_MK=random(8, 64), b_NK=random(32, 64), out_scale=torch.ones(1))),
    (
        matmul_fp8,
        dict(a_MK=random(16, 64).to(FP8), b_NK=random(32, 64).to(FP8), scale_a=torch.ones(16))
        | dict(scale_b=torch.ones(1), out=torch.empty(16, 32, dtype=BF16)),
    ),
    (
        skinny_matmul,
        dict(x_MK=random(8, 64, dtype=BF16), w_NK=random(32, 64, dtype=BF16)) | PRODUCT,
    ),
    (
        skinny_fp8,
        dict(x=random(1, 64, dtype=BF16), w=quantized(random(32, 64)), bias_N=random(32)),
    ),
    (skinny_fp8, dict(x=quantized(random(4, 64)), w=quantized(random(32, 64)))),
    (
        packed_matmul,
        dict(x_MK=random(4, 64, dtype=BF16), w=seeded(random_packed, 64, 64, 64, True, "cpu"))
        | dict(bias_N=random(64)),
    ),
    (
        packed_parts,
        dict(x_MK=random(4, 64, dtype=BF16), w=seeded(random_packed, 64, 64, 64, True, "cpu")),
    ),
    (
        dequantize_packed,
        dict(w=seeded(random_packed, 64, 64, 64, True, "cpu"), out=torch.empty(64, 64, dtype=BF16)),
    ),
    (
        weight_only_matmul,
        dict(x_MK=random(4, 64, dtype=BF16), w=seeded(random_rows, FORMS[3], 64, 64, "cpu"))
        | dict(bias_N=random(64)),
    ),
    (
        weight_only_parts,
        dict(x_MK=random(4, 64, dtype=BF16), w=seeded(random_rows, OTHERS[1], 64, 64, "cpu")),
    ),
    (dequantize_rows, dict(w=seeded(random_rows, FORMS[3], 64, 64, "cpu"), dtype=BF16)),
    (skinny_fp8_parts, dict(x=quantized(random(4, 64)), w=quantized(random(32, 64)))),
    (skinny_parts, dict(x_MK=random(4, 64, dtype=BF16), w_NK=random(32, 64, dtype=BF16))),
    (cross_entropy, dict(logits_TV=random(5, 40), targets_T=T)),
    (cross_entropy_, dict(logits_TV=random(5, 40), targets_T=T, grad_scale=torch.ones(5))),
    (
        linear_cross_entropy,
        dict(x_TD=random(5, 32), weight_VD=random(40, 32), targets_T=T, weights_T=torch.ones(5)),
    ),
    (
        logprobs,
        dict(logits_BV=B.logits_BV, tokens_B=ids(1, 2, 3), n=4)
        | dict(out=LogProbs(torch.empty(3), torch.empty(3, 4), torch.empty(3, 4).int())),
    ),
    (
        sample,
        dict(logits_BV=B.logits_BV, parameters=B.parameters, position_B=B.position_B)
        | dict(rows_B=ids(0, 2, -1), penalties=seeded(random_penalties, 3, 100, "cpu"), out=B.out_B)
        | dict(allowed_BW=torch.full((3, 4), -1, dtype=torch.int32)),
    ),
    (penalize, dict(logits_BV=B.logits_BV, penalties=seeded(random_penalties, 3, 100, "cpu"))),
    (
        count,
        dict(
            penalties=seeded(random_penalties, 3, 100, "cpu"),
            tokens_B=ids(1, 2, 3),
            rows_B=ids(0, 2, -1),
        ),
    ),
    (adamw, dict(state=moments(), step=Step(1, 1e-3), scale=torch.ones(()))),
    (square_sum, dict(grads=[random(8, 8), random(5)])),
    (clip_scale, dict(square_sum=torch.ones(()), max_norm=1.0)),
    (copy_blocks, dict(cache=random(2, 6, 16, 1, 64), pairs=ids(0, 1, 2, 3, -1, 4).view(3, 2))),
    (
        swap_blocks,
        dict(source=random(2, 6, 16, 1, 64), target=random(2, 6, 16, 1, 64))
        | dict(pairs=ids(0, 1, 2, 3).view(2, 2)),
    ),
    (
        route,
        dict(logits_TE=random(3, 5), routing=Routing(2), bias_E=random(5), slots_T=ids(1, -1, 2)),
    ),
    (sort_pairs, dict(chosen_TK=CHOSEN, count=3)),
    (grouped_matmul, EXPERTS | dict(x=random(3, 16), gather=True, gating=SWIGLU)),
    (
        grouped_matmul,
        dict(
            x=random(3, 16),
            w_ENK=random(3, 8, 16),
            pairs=FewPairs(CHOSEN.flatten(), 2),
            gather=True,
        ),
    ),
    (grouped_parts, EXPERTS | dict(x_PK=random(6, 16), weights_TK=random(3, 2))),
    (
        combine,
        dict(results_PD=random(6, 8), places_P=ids(0, 4, 2, 5, 1, 3), weights_TK=random(3, 2)),
    ),
    *(
        (
            summed,
            dict(
                choices=Choices(random(6, 8), ids(0, 4, 2, 5, 1, 3), random(3, 2)),
                residual=random(3, 8),
                weight=random(8),
            ),
        )
        for summed in (combine_add_rmsnorm, combine_add_rmsnorm_fp8)
    ),
    (
        gate_backward,
        dict(
            grad_PF=random(6, 4),
            inner_PI=random(6, 8),
            order_P=ids(0, 4, 2, 5, 1, 3),
            weights_TK=random(3, 2),
        ),
    ),
    (step_inputs, step()),
    (keep_tokens, dict(state=step()["state"], tokens_B=ids(1, 2), rows_B=ids(0, 2))),
    (accept_tokens, dict(zip(("drawn", "state"), seeded(random_draws, 3, 2, "cpu"), strict=True))),
    (
        draft_ngrams,
        dict(
            zip(
                ("rows_B", "bounds_B1", "tokens_T", "positions_T", "text_NC"),
                seeded(random_texts, 3, 20, 2, "cpu"),
                strict=True,
            )
        ),
    ),
    (
        synthetic_draws,
        dict(zip(("drawn", "rates_K", "steps_N"), seeded(random_rates, 3, 2, "cpu"), strict=True)),
    ),
]


def tensors(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Every tensor of the arguments, also inside tuples and lists, with the way to it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from tensors(part, (*path, name))
    elif isinstance(value, tuple | list):
        for place, part in enumerate(value):
            yield from tensors(part, (*path, place))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """A copy of the arguments, of all tensors too, with `new` at the end of the path."""
    if isinstance(value, dict):
        return {
            name: replaced(part, path[1:] if path[:1] == (name,) else ("",), new)
            for name, part in value.items()
        }
    if isinstance(value, tuple | list):
        parts = [
            replaced(part, path[1:] if path[:1] == (place,) else ("",), new)
            for place, part in enumerate(value)
        ]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if not path:
        return new
    return value.clone() if isinstance(value, Tensor) else value


def mistakes(good: Tensor) -> Iterator[tuple[str, Any]]:
    wide = good.float() if good.dtype.itemsize == 1 else good
    for dtype in WRONG_TYPES:
        if dtype != good.dtype:
            yield str(dtype), wide.to(dtype)
    yield "a dimension more", good[None]
    yield "on another device", torch.empty(good.shape, dtype=good.dtype, device="meta")
    if not good.ndim or not good.numel():
        return
    yield "a dimension less", good[0]
    for place in range(good.ndim):
        yield (
            f"dimension {place} longer",
            torch.cat([wide, wide.narrow(place, 0, 1)], place).to(good.dtype),
        )
        yield f"dimension {place} empty", good.narrow(place, 0, 0)
    apart = torch.zeros(*good.shape[:-1], 2 * good.shape[-1], dtype=good.dtype)[..., ::2]
    yield "apart", apart.copy_(good)
    yield "one place for all", good.narrow(0, 0, 1).expand(good.shape)


# Structs of tensors that the engine makes and nobody else: their kernels look at some of them only.
UNCHECKED = {("count", "penalties"), ("keep_tokens", "state"), ("accept_tokens", "state")}
# Mistakes that are none for these: a copy of bytes takes any type, an oracle float64, one tensor alone any device, and
# what is read as a list of rows or as one number any number of dimensions.
ANY_TYPE = {("copy_blocks", "cache")}
FLOAT64 = {
    ("clip_scale", "square_sum"),
    ("cross_entropy", "logits_TV"),
    ("cross_entropy_", "logits_TV"),
    ("rope_table", "frequencies"),
    ("sort_pairs", "chosen_TK"),
}
ALONE = {
    ("clip_scale", "square_sum"),
    ("geglu", "gate"),
    ("quantize_tensor", "x"),
    ("quantize_transposed", "x"),
    ("rope_table", "frequencies"),
    ("sort_pairs", "chosen_TK"),
}
ANY_RANK = {
    ("adamw", "scale"),
    ("clip_scale", "square_sum"),
    ("cross_entropy_", "grad_scale"),
    ("geglu", "gate"),
    ("linear_cross_entropy", "weights_T"),
    ("matmul", "a_MK"),
    ("matmul", "out_scale"),
    ("matmul_fp8", "scale_a"),
    ("matmul_fp8", "scale_b"),
    ("quantize_tensor", "scale"),
    ("quantize_tensor", "x"),
    ("skinny_parts", "x_MK"),
    ("rope_write", "pages.3"),  # the scale of keys
    ("rope_write", "pages.4"),
    ("square_sum", "grads.0"),
    ("square_sum", "grads.1"),
}


BY_ROWS = {
    "accept_tokens",
    "count",
    "draft_ngrams",
    "keep_tokens",
    "step_inputs",
    "synthetic_draws",
}


def must_refuse(argument: tuple[str, str], mistakes: set[str]) -> set[str]:
    """Other types, devices and numbers of dimensions are refused for every argument, not for some."""
    wanted = {mistake for mistake in mistakes if mistake.startswith("torch.")}
    if argument in ANY_TYPE:
        wanted.clear()
    if argument in FLOAT64:
        wanted.discard("torch.float64")
    if argument not in ALONE:
        wanted.add("on another device")
    if argument not in ANY_RANK:
        wanted.add("a dimension more")
    return wanted & mistakes


@pytest.mark.parametrize(
    ("function", "arguments"), CALLS, ids=[f"{f.__name__}-{i}" for i, (f, _) in enumerate(CALLS)]
)
def test_a_wrong_tensor_is_named(function, arguments):
    function(**replaced(arguments, ("",), None))
    for path, good in tensors(arguments):
        refused, tried = set(), set()
        for mistake, wrong in mistakes(good):
            if function is swap_blocks and "device" in mistake:
                continue  # one cache is the host's
            answer = _answer(function, replaced(arguments, path, wrong))
            tried.add(mistake)
            if ": wanted " in answer:
                refused.add(mistake)
            assert not answer or ": wanted " in answer, f"{path}, {mistake}: {answer}"
        argument = (function.__name__, ".".join(map(str, path)))
        accepted = must_refuse(argument, tried) - refused
        unchecked = (function.__name__, path[0]) in UNCHECKED
        assert unchecked or not accepted, f"{path} is accepted: {sorted(accepted)}"


def _answer(function: Any, arguments: dict[str, Any]) -> str:
    """What is said against the call; nothing, if it is fine."""
    try:
        function(**arguments)
    except ValueError as error:
        return str(error)
    except IndexError as error:  # whether a row or a page exists is a matter of values
        return "" if function.__name__ in BY_ROWS else repr(error)
    except Exception as error:  # noqa: BLE001
        return repr(error)
    return ""


def test_no_function_is_left_out():
    tried = {function.__name__ for function, _ in CALLS} | {"swiglu", "attention_gradients"}
    for name, entry in catalogue.kernels().items():
        module = importlib.import_module(entry.kernel)
        for public, function in inspect.getmembers(module, inspect.isfunction):
            takes = inspect.signature(function).parameters
            is_own = function.__module__ == module.__name__ and not public.startswith("_")
            assert not (is_own and "impl" in takes) or public in tried, f"{name}.{public}"
