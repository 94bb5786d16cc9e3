"""Configurations of the attention kernels that are compiled and linted without a GPU."""

import functools

import torch
import triton

from cairn.kernels.attention.attention_backward import _constants as backward_constants
from cairn.kernels.attention.attention_backward import _one_walk, backward_candidates
from cairn.kernels.attention.attention_backward import backward_config as triton_backward_config
from cairn.kernels.attention.attention_backward_kernels import keys_kernel as triton_keys_kernel
from cairn.kernels.attention.attention_backward_kernels import (
    queries_kernel as triton_queries_kernel,
)
from cairn.kernels.attention.attention_backward_kernels import rows_kernel
from cairn.kernels.attention.attention_forward import (
    FORWARD_CANDIDATES,
    _forward_kernel,
    forward_config,
)
from cairn.kernels.attention.attention_forward import _constants as forward_constants
from cairn.kernels.attention.attention_gluon import CONFIGS
from cairn.kernels.attention.attention_gluon import _constants as gluon_constants
from cairn.kernels.attention.attention_gluon_backward import WIDTHS, pair_of
from cairn.kernels.attention.attention_gluon_backward import (
    backward_config as gluon_backward_config,
)
from cairn.kernels.attention.attention_gluon_kernel import attention_kernel
from cairn.kernels.attention.attention_gluon_keys import STEP
from cairn.kernels.attention.attention_gluon_keys import keys_kernel as gluon_keys_kernel
from cairn.kernels.attention.attention_gluon_queries import queries_kernel as gluon_queries_kernel
from cairn.kernels.attention.attention_gluon_slopes import slopes_kernel
from cairn.kernels.attention.attention_rings import AVERAGE_REGISTERS, HALF, REGISTERS, described
from cairn.kernels.attention.attention_schedule import _schedule_kernel
from cairn.kernels.kernel import Variant

FORWARD_POINTERS = ("q", "k", "v", "out")


FORWARD_INTEGERS = (
    "sequences",
    "tokens",
    "max_q",
    "max_k",
    "stride_q",
    "stride_k",
    "stride_v",
    "stride_q_head",
    "stride_k_head",
    "stride_v_head",
    "window",
)


def _forward_variant(
    width: int, causal: bool, config: dict[str, int], note: str = "", **flags: bool
) -> Variant:
    flags = dict(DENSE=False, WINDOW=False, SOFTCAP=False, SINKS=False) | flags
    types = dict.fromkeys(FORWARD_POINTERS, "*bf16") | dict.fromkeys(FORWARD_INTEGERS, "i32")
    types |= dict(
        sinks="*fp32", lse="*fp32", cu_q="*i32", cu_k="*i32", scale_log2="fp32", softcap="fp32"
    )
    shape = f"{config['block_m']}x{config['block_n']} w{config['warps']} s{config['stages']}"
    mask = "causal" if causal else "full"
    return Variant(
        name=f"attention forward D{width} {mask} {shape}{' TMA' if config['tma'] else ''}{note}",
        function=_forward_kernel,
        types=types,
        constants=forward_constants(width, 32, 8, False, config, bool(config["tma"]))
        | flags
        | dict(CAUSAL=causal),
        options=dict(num_warps=config["warps"], num_stages=config["stages"]),
        aligned=(
            *FORWARD_POINTERS,
            "lse",
            "stride_q",
            "stride_k",
            "stride_v",
            "stride_q_head",
            "stride_k_head",
            "stride_v_head",
        ),
        expect="wgmma",
    )


def _forward_variants() -> list[Variant]:
    usual = functools.partial(forward_config, dtype=torch.bfloat16)
    every = dict(WINDOW=True, SOFTCAP=True, SINKS=True)
    return [
        *(
            _forward_variant(width, causal, usual(width, tma=True))
            for width in (64, 96, 128, 256)
            for causal in (True, False)
        ),
        *(_forward_variant(128, True, config) for config in FORWARD_CANDIDATES[1:]),
        _forward_variant(128, True, usual(128, tma=True), " dense", DENSE=True),
        *(
            _forward_variant(width, True, usual(width, tma=True), " window softcap sinks", **every)
            for width in (64, 128, 256)
        ),
    ]


FORWARD_VARIANTS = _forward_variants()


BACKWARD_INTEGERS = ("sequences", "tokens_q", "tokens_k", "max_q", "max_k", "window")


BACKWARD_STRIDES = (
    *(f"stride_{name}{suffix}" for suffix in ("", "_head") for name in ("q", "k", "v", "dout")),
    "stride_level",
)


BACKWARD_TENSORS = ("q", "k", "v", "dout", "dq", "dk", "dv")


def _backward_variant(
    part: str, width: int, causal: bool, config: dict[str, int], note: str = "", **flags: bool
) -> Variant:
    function = triton_keys_kernel if part == "keys" else triton_queries_kernel
    types = dict.fromkeys(BACKWARD_TENSORS, "*bf16") | dict.fromkeys(
        (*BACKWARD_INTEGERS, *BACKWARD_STRIDES), "i32"
    )
    types |= dict.fromkeys(("level", "delta"), "*fp32") | dict.fromkeys(("cu_q", "cu_k"), "*i32")
    types |= dict.fromkeys(("scale", "scale_log2", "softcap"), "fp32")
    constants = backward_constants(width, 4, False, config, part, bool(config["tma"]))
    constants |= dict(DENSE=False, WINDOW=False, SOFTCAP=False, CAUSAL=causal) | flags
    constants |= (
        dict(KV_HEADS=8, ONE_WALK=_one_walk(width, constants["WINDOW"]))
        if part == "keys"
        else dict(HEADS=32)
    )
    names = function.arg_names
    shape = f"{config[f'{part}_m']}x{config[f'{part}_n']} w{config[f'{part}_warps']} s{config[f'{part}_stages']}"
    return Variant(
        name=f"attention backward {part} D{width} {'causal' if causal else 'full'} {shape}"
        f"{' TMA' if constants['TMA'] else ''}{note}",
        function=function,
        types={name: kind for name, kind in types.items() if name in names},
        constants=constants,
        options=dict(num_warps=config[f"{part}_warps"], num_stages=config[f"{part}_stages"]),
        aligned=[
            name
            for name in (*BACKWARD_TENSORS, "level", "delta", *BACKWARD_STRIDES)
            if name in names
        ],
        expect="wgmma",
    )


def _backward_variants() -> list[Variant]:
    every = dict(WINDOW=True, SOFTCAP=True)
    _, deeper, shallower, smaller, narrower, wider = backward_candidates(128)
    return [
        *(
            _backward_variant(
                part,
                width,
                causal,
                triton_backward_config(width, torch.bfloat16, tma=True, plain=True),
            )
            for part in ("keys", "queries")
            for width in (64, 96, 128, 256)
            for causal in (True, False)
        ),
        *(
            _backward_variant(
                part,
                width,
                True,
                triton_backward_config(width, torch.bfloat16, tma=True, plain=False),
                " window softcap",
                **every,
            )
            for part in ("keys", "queries")
            for width in (64, 128, 256)
        ),
        *(_backward_variant("keys", 128, True, config) for config in (deeper, smaller)),
        *(
            _backward_variant("queries", 128, True, config)
            for config in (shallower, narrower, wider)
        ),
    ]


def _backward_rows_variant(width: int, dense: bool, dlse: bool) -> Variant:
    pointers = dict(out="*bf16", dout="*bf16", lse="*fp32", level="*fp32", delta="*fp32")
    pointers |= {"dlse": "*fp32"} if dlse else {}
    pointers |= {} if dense else {"cu": "*i32"}
    numbers = ("sequences", "tokens", "longest")
    strides = ("stride", "stride_head", "stride_lse", "stride_dlse", "stride_level")
    constants = dict(
        HEADS=32, D=width, BLOCK_D=triton.next_power_of_2(width), DENSE=dense, DLSE=dlse
    )
    absent = dict.fromkeys({"dlse", "cu"} - pointers.keys())
    return Variant(
        f"attention backward rows D{width}{' equal lengths' * dense}{' + d lse' * dlse}",
        rows_kernel,
        pointers
        | dict.fromkeys((*numbers, *strides), "i32")
        | dict.fromkeys(("level_scale", "delta_scale"), "fp32"),
        constants | absent,
        {"num_warps": 4},
        [*pointers, *strides],
    )


BACKWARD_VARIANTS = [
    *_backward_variants(),
    *(_backward_rows_variant(width, dense=False, dlse=False) for width in (64, 96, 128, 256)),
    _backward_rows_variant(128, dense=True, dlse=True),
]


def _gluon_variant(
    width: int,
    *,
    causal: bool = True,
    dense: bool = False,
    ping_pong: bool = True,
    sinks: bool = False,
) -> Variant:
    config = CONFIGS[width] | dict(ping_pong=ping_pong)
    rows = [config["block_n"], width] if dense else [1, 1, config["block_n"], width]
    types = dict(
        q_desc=described([HALF.value, width]), k_desc=described(rows), v_desc=described(rows)
    )
    types |= dict(
        out="*bf16",
        lse="*fp32",
        sinks="*fp32",
        tiles="*i32",
        cu="*i32",
        sequences="i32",
        tokens="i32",
        length="i32",
        scale_log2="fp32",
    )
    words = ["causal" if causal else "full", "equal lengths" if dense else "ragged"]
    words += ["ping-pong"] * ping_pong + ["sinks"] * sinks
    return Variant(
        name=f"attention gluon D{width} {' '.join(words)}",
        function=attention_kernel,
        types=types,
        constants=gluon_constants(width, 32, 8, config, 8)
        | dict(DENSE=dense, RAGGED=not dense, CAUSAL=causal, SINKS=sinks),
        options=dict(num_warps=4, maxnreg=AVERAGE_REGISTERS),
        aligned=("out", "lse"),
        expect="wgmma",
        gluon=True,
    )


GLUON_VARIANTS = [
    *(_gluon_variant(width) for width in CONFIGS),
    *(_gluon_variant(width, dense=True) for width in (64, 128)),
    *(
        _gluon_variant(128, causal=causal, dense=dense, ping_pong=False)
        for causal in (True, False)
        for dense in (True, False)
    ),
    _gluon_variant(128, causal=False),
    _gluon_variant(64, sinks=True),
]


def _gluon_backward_variant(
    part: str, width: int, causal: bool, ragged: bool, slopes: bool = False
) -> Variant:
    config = gluon_backward_config(width)
    rows, half = ([1, 1, STEP.value, width] if ragged else [STEP.value, width]), [HALF.value, width]
    numbers = described([1, STEP.value], torch.float32)
    types = dict(tiles="*i32", cu="*i32", sequences="i32", tokens="i32", scale_log2="fp32")
    constants = dict(
        GROUP=4,
        D=width,
        CAUSAL=causal,
        RAGGED=ragged,
        REGISTERS=REGISTERS,
        BUFFERS=config[f"{part}_buffers"],
    )
    if part == "keys":
        types |= dict(
            q_desc=described(rows),
            dout_desc=described(rows),
            k_desc=described(half),
            v_desc=described(half),
            level_desc=numbers,
            delta_desc=numbers,
            dkv="*bf16",
            slopes_desc=described([STEP.value] * 2) if slopes else numbers,
        )
        constants |= dict(KV_HEADS=8, FIRST=32, ROW=48, SECTION=2, SLOPES=slopes)
    else:
        types |= dict(
            q_desc=described(half),
            dout_desc=described(half),
            k_desc=described(rows),
            v_desc=described(rows),
            level="*fp32",
            delta="*fp32",
            dq="*bf16",
            stride_level="i32",
        )
        constants |= dict(HEADS=32, SECTION=8, ROW=48)
    return Variant(
        name=f"attention gluon backward {part} D{width} {'causal' if causal else 'full'}"
        f"{' ragged' if ragged else ' equal lengths'}{' slopes kept' * slopes}",
        function=gluon_keys_kernel if part == "keys" else gluon_queries_kernel,
        types=types,
        constants=constants,
        options=dict(num_warps=4, maxnreg=AVERAGE_REGISTERS),
        aligned=[name for name in ("dkv", "dq", "level", "delta", "stride_level") if name in types],
        expect="wgmma",
        gluon=True,
    )


def _gluon_backward_from_slopes() -> Variant:
    block = described([STEP.value, 128])
    types = dict(slopes_desc=described([STEP.value] * 2), k_desc=block, out_desc=block, dq="*bf16")
    config = gluon_backward_config(128)
    return Variant(
        name="attention gluon backward queries from slopes D128 causal",
        function=slopes_kernel,
        types=types | dict(sequences="i32", length="i32", scale="fp32"),
        constants=dict(
            HEADS=32,
            GROUP=4,
            SECTION=8,
            ROW=48,
            D=128,
            BUFFERS=config["slopes_buffers"],
            PAIR=pair_of(4),
            CAUSAL=True,
            REGISTERS=REGISTERS,
        ),
        options=dict(num_warps=4, maxnreg=AVERAGE_REGISTERS),
        aligned=["dq"],
        expect="wgmma",
        gluon=True,
    )


GLUON_BACKWARD_VARIANTS = [
    *(
        _gluon_backward_variant(part, width, True, True)
        for part in ("keys", "queries")
        for width in WIDTHS
    ),
    _gluon_backward_variant("keys", 128, False, True),
    *(
        _gluon_backward_variant(part, 128, causal, False)
        for part in ("keys", "queries")
        for causal in (True, False)
    ),
    _gluon_backward_variant("keys", 128, True, False, slopes=True),
    _gluon_backward_from_slopes(),
]


def _schedule_variant(causal: bool) -> Variant:
    return Variant(
        f"attention schedule, {'causal' if causal else 'full'}",
        _schedule_kernel,
        {"cu": "*i32", "tiles": "*i32", "sequences": "i32"},
        {"BLOCK": 128, "CAUSAL": causal, "CHUNK": 1024},
        {"num_warps": 1},
        ["cu", "tiles"],
    )


SCHEDULE_VARIANTS = [_schedule_variant(True), _schedule_variant(False)]


VARIANTS = [
    *FORWARD_VARIANTS,
    *GLUON_VARIANTS,
    *BACKWARD_VARIANTS,
    *GLUON_BACKWARD_VARIANTS,
    *SCHEDULE_VARIANTS,
]
