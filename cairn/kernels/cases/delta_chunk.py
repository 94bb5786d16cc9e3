"""The variants of the gated delta rule and its convolution that are compiled, and where it is measured."""

import functools
from collections.abc import Iterator
from typing import Any

import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.delta import delta_chunk, delta_step, short_conv
from cairn.kernels.delta.rule import CHUNK, DeltaCall, Sequences, delta_chunk_reference, unit_length
from cairn.kernels.kernel import Case, Prepared, Variant

KERNEL = "cairn.kernels.delta.delta_chunk"
KEY_HEADS, HEADS, WIDTH, TAPS = 16, 32, 128, 4  # Qwen3-Next
SIZES = dict(KEY_HEADS=KEY_HEADS, HEADS=HEADS, K=WIDTH, V=WIDTH)


def _variant(
    name: str, function: Any, types: dict[str, str], warps: int, stages: int = 1, **constants: Any
) -> Variant:
    loose = ("sequences", "tokens", "scale")
    aligned = tuple(n for n in types if n not in loose)
    multiplies = "mma" if "CHUNK" in constants else "none"
    return Variant(
        name,
        function,
        types,
        constants,
        {"num_warps": warps, "num_stages": stages},
        aligned,
        multiplies,
        allowed_spills=32 if stages > 1 else 0,  # of a chunk whose next one is on its way
    )


def _pointers(names: str, **others: str) -> dict[str, str]:
    found = dict.fromkeys(names.split(), "*bf16")
    found |= {n: "*fp32" for n in ("g", "beta", "state", "rates") if n in found}
    found |= {n: "*i32" for n in ("slots", "starts") if n in found}
    return {**found, **others}


_STEP = _pointers("mixed g beta state slots starts y", slot_stride="i32", scale="fp32")
_FACTORS = _pointers("mixed g beta rates slots starts u w", sequences="i32")
_SCORES = _pointers("mixed g slots starts scores rates", sequences="i32", scale="fp32")
_PASS = _pointers("mixed u w scores rates state slots starts y", slot_stride="i32")
_CONV = _pointers(
    "x weight before slots starts y", sequences="i32", tokens="i32", E="i32", slot_stride="i32"
)
_KEEP = _pointers("x before slots starts", E="i32", slot_stride="i32")

VARIANTS = [
    _variant("delta step", delta_step._step_kernel, _STEP, 4, **SIZES, STARTS=False, BV=64),
    _variant("delta step, mixed", delta_step._step_kernel, _STEP, 4, **SIZES, STARTS=True, BV=64),
    _variant(
        "delta scores",
        delta_chunk._scores_kernel,
        _SCORES,
        4,
        **SIZES,
        STARTS=True,
        SEQUENCES=128,
        CHUNK=CHUNK,
        PRECISION="tf32",
    ),
    _variant(
        "delta factors",
        delta_chunk._factors_kernel,
        _FACTORS,
        delta_chunk.FACTOR_WARPS,
        **SIZES,
        STARTS=True,
        COLUMNS=delta_chunk.COLUMNS,
        SEQUENCES=128,
        CHUNK=CHUNK,
        LEVELS=delta_chunk.LEVELS,
        PRECISION="tf32",
        SOLVE=delta_chunk.SOLVE,
    ),
    *(
        _variant(
            f"delta pass {columns}",
            delta_chunk._pass_kernel,
            _PASS,
            4,
            delta_chunk.STAGES,
            **SIZES,
            STARTS=True,
            BV=columns,
            CHUNK=CHUNK,
            PRECISION="tf32",
        )
        for columns in (delta_chunk.FEW_VALUES, delta_chunk.MANY_VALUES)
    ),
    *(
        _variant(
            f"short convolution{', mixed' if starts else ''}",
            short_conv._conv_kernel,
            _CONV,
            4,
            KEPT=TAPS - 1,
            SILU=True,
            SEQUENCES=128,
            STARTS=starts,
            TOKENS=short_conv.TOKENS,
            COLUMNS=short_conv.COLUMNS,
        )
        for starts in (False, True)
    ),
    _variant(
        "short convolution keeps",
        short_conv._keep_kernel,
        _KEEP,
        1,
        KEPT=TAPS - 1,
        ROWS=4,
        STARTS=True,
        COLUMNS=short_conv.COLUMNS,
    ),
]


def cases() -> Iterator[Case]:
    for sequences in (1, 64, 256):
        work = delta_step.cost(sequences, HEADS, WIDTH, WIDTH)
        name = f"step, {sequences} sequences"
        yield Case(
            "delta_chunk", name, "bf16", work, lambda b=sequences: _prepare(b, 1), graph=True
        )
    for sequences, tokens in ((1, 8192), (8, 2048)):
        work = delta_chunk.cost(sequences * tokens, HEADS, WIDTH, WIDTH)
        prepare = functools.partial(_prepare, sequences, tokens)
        yield Case("delta_chunk", f"chunks, {sequences} x {tokens}", "bf16", work, prepare)


def _prepare(count: int, each: int) -> Prepared:
    tokens = count * each
    wide = 2 * KEY_HEADS * WIDTH + HEADS * WIDTH
    mixed = torch.randn(tokens, wide, device="cuda").to(torch.bfloat16)
    g, beta = (-torch.rand(tokens, HEADS, device="cuda") for _ in range(2))
    state = torch.zeros(count, HEADS * WIDTH, WIDTH, device="cuda")
    slots = torch.arange(count, dtype=torch.int32, device="cuda")
    starts = (
        None if each == 1 else torch.arange(0, tokens + 1, each, dtype=torch.int32, device="cuda")
    )
    call = DeltaCall(mixed, g, -beta, state, Sequences(slots, starts, tokens), KEY_HEADS, WIDTH)

    def error() -> float:
        state.zero_()
        found = delta_chunk.delta_rule(call)[:each]
        parts = (
            mixed[:each].double().split((KEY_HEADS * WIDTH, KEY_HEADS * WIDTH, HEADS * WIDTH), -1)
        )
        q, k = (
            unit_length(x.unflatten(-1, (KEY_HEADS, -1))).repeat_interleave(HEADS // KEY_HEADS, -2)
            for x in parts[:2]
        )
        rest = (parts[2].unflatten(-1, (HEADS, -1)), g[:each].double(), -beta[:each].double())
        blank = state.new_zeros(HEADS, WIDTH, WIDTH, dtype=torch.float64)
        return relative_error(found, delta_chunk_reference(q * WIDTH**-0.5, k, *rest, blank)[0])

    copied = torch.empty_like(state)
    return Prepared(
        lambda: delta_chunk.delta_rule(call),
        {"copy of the states": lambda: copied.copy_(state)},
        error,
    )


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
