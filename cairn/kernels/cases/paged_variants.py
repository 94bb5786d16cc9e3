"""Configurations of the two paged kernels that are compiled and linted without a GPU."""

from collections.abc import Iterator

from torch import bfloat16, float8_e4m3fn

from cairn.kernels.attention.attention_rings import shared_layout
from cairn.kernels.kernel import Expect, Variant
from cairn.kernels.paged.paged_decode import CANDIDATES as DECODE_PLANS
from cairn.kernels.paged.paged_decode import Plan as DecodePlan
from cairn.kernels.paged.paged_decode import _decode_kernel
from cairn.kernels.paged.paged_decode_gluon import BESIDE_8_BITS, PLAN_8_BITS, SWIZZLED
from cairn.kernels.paged.paged_decode_gluon import Plan as StreamPlan
from cairn.kernels.paged.paged_decode_gluon import constants as stream_constants
from cairn.kernels.paged.paged_decode_gluon_kernel import decode_kernel
from cairn.kernels.paged.paged_gluon_kernel import prefill_kernel
from cairn.kernels.paged.paged_parts import add_up_kernel
from cairn.kernels.paged.paged_prefill import CANDIDATES as PREFILL_PLANS
from cairn.kernels.paged.paged_prefill import PLAN_8_BITS as PREFILL_8_BITS
from cairn.kernels.paged.paged_prefill import Plan as PrefillPlan
from cairn.kernels.paged.paged_prefill import _prefill_kernel
from cairn.kernels.paged.paged_prefill_gluon import AVERAGE_REGISTERS, constants
from cairn.kernels.paged.paged_tiles import power_of_2
from cairn.kernels.tuned import numbers_of, shipped

TENSORS = dict(
    q="*bf16", k="*bf16", v="*bf16", tables="*i32", lengths="*i32", starts="*i32", out="*bf16", lse="*fp32",
    sinks="*fp32", k_scale="*fp32", v_scale="*fp32",
)  # fmt: skip
STRIDES = (
    "q_token",
    "q_head",
    "out_token",
    "out_head",
    "page_stride",
    "token_stride",
    "head_stride",
)
NUMBERS = dict(sequences="i32", scale="fp32", table_stride="i32") | dict.fromkeys(STRIDES, "i32")
PLAIN = dict(
    KV_HEADS=8, GROUP=4, C=128, WIDTH=128, SEQUENCES=128, WINDOW=0, SOFTCAP=0.0, SINKS=False, LSE=False, EXACT=False,
)  # fmt: skip


def decode(
    name: str, plan: DecodePlan, cache: str = "bf16", expect: Expect = "mma", **changes: object
) -> Variant:
    rooms = dict(partial="*fp32", partial_lse="*fp32", arrivals="*i32")
    types = {**TENSORS, **rooms, **NUMBERS, "k": f"*{cache}", "v": f"*{cache}"}
    fixed = PLAIN | dict(
        QUERIES=1, ROWS=16, PAGE=16, BLOCK=plan.block, SCALES=int(cache == "fp8e4nv"), STARTS=False,
        STAGES=plan.stages, LAST_ADDS=True, EARLY=True, OVERLAP=True,
    ) | changes  # fmt: skip
    aligned = tuple(types.keys() - {"sequences", "scale", "table_stride"})
    options = {"num_warps": plan.warps}
    return Variant(f"paged_decode {name}", _decode_kernel, types, fixed, options, aligned, expect)


def add_up() -> Variant:
    types = dict(
        partial="*fp32", partial_lse="*fp32", lengths="*i32", starts="*i32", out="*bf16", lse="*fp32",
        sequences="i32", programs="i32", out_token="i32", out_head="i32",
    )  # fmt: skip
    fixed = dict(
        KV_HEADS=8, GROUP=4, QUERIES=1, ROWS=16, C=128, WIDTH=128, BLOCK=64, SEQUENCES=16, WINDOW=0, LSE=True,
        STARTS=True, EARLY=True, OVERLAP=True,
    )  # fmt: skip
    aligned = ("partial", "partial_lse", "out", "lse", "out_token", "out_head")
    return Variant("paged_decode add up", add_up_kernel, types, fixed, {"num_warps": 4}, aligned)


def prefill(name: str, plan: PrefillPlan, cache: str = "bf16", **changes: object) -> Variant:
    tile = (
        f"tensordesc<{cache}[{plan.block}, {changes.get('C', 128)}]>" if plan.tma else f"*{cache}"
    )
    views = {"k_view": tile, "v_view": tile}
    more = dict.fromkeys(("skip", "page_rows", "head_rows", "head_columns"), "i32")
    types = {**TENSORS, **views, **NUMBERS, **more, "k": f"*{cache}", "v": f"*{cache}"}
    fixed = PLAIN | dict(
        ROWS=plan.rows, PAGE=256 if plan.tma else 16, BLOCK=plan.block, SCALES=int(cache == "fp8e4nv"), STARTS=True,
        TMA=plan.tma, STAGES=plan.stages, ALL=False,
    ) | changes  # fmt: skip
    loose = {"sequences", "scale", "table_stride", *more} | (views.keys() if plan.tma else set())
    aligned = tuple(types.keys() - loose)
    options = {"num_warps": plan.warps}
    return Variant(
        f"paged_prefill {name}", _prefill_kernel, types, fixed, options, aligned, "wgmma"
    )


def gluon(
    name: str,
    page: int,
    columns: int = 128,
    group: int = 4,
    ping_pong: bool = True,
    more: bool = False,
) -> Variant:
    box = [min(page, 128), 64]
    shapes = dict(q_view=[64 // group, group, columns], k_view=box, v_view=box)
    types = {
        view: f"tensordesc<bf16{shape},{shared_layout(shape, bfloat16)!r}>"
        for view, shape in shapes.items()
    }
    types |= {
        name: TENSORS[name] for name in ("tables", "lengths", "starts", "out", "lse", "sinks")
    }
    numbers = (
        "sequences",
        "skip",
        "table_stride",
        "out_token",
        "out_head",
        "page_rows",
        "head_rows",
        "head_columns",
    )
    types |= {"scale_log2": "fp32", **dict.fromkeys(numbers, "i32")}
    fixed = constants(8, group, columns, page, ping_pong) | dict(SINKS=more, LSE=more)
    options = {"num_warps": 4, "maxnreg": AVERAGE_REGISTERS}
    aligned = ("out", "lse", "out_token", "out_head")
    return Variant(
        f"paged_prefill gluon {name}",
        prefill_kernel,
        types,
        fixed,
        options,
        aligned,
        "wgmma",
        gluon=True,
    )


def decode_gluon(
    name: str,
    group: int = 4,
    columns: int = 128,
    page: int = 64,
    fp8: bool = False,
    starts: int = 0,
    beside: bool = False,
) -> Variant:
    plan = (BESIDE_8_BITS if beside else PLAN_8_BITS) if fp8 else StreamPlan()
    dtype = float8_e4m3fn if fp8 else bfloat16
    box = [plan.box, min(columns, SWIZZLED // dtype.itemsize)]
    described = f"tensordesc<{'fp8e4nv' if fp8 else 'bf16'}{box},{shared_layout(box, dtype)!r}>"
    pointers = {
        name: TENSORS.get(name, "*fp32")
        for name in (
            "q",
            "tables",
            "lengths",
            "starts",
            "out",
            "partial",
            "partial_lse",
            "k_scale",
            "v_scale",
        )
    }
    numbers = (
        "table_stride", "q_token", "q_head", "out_token", "out_head", "page_rows", "head_rows",
        "head_columns",
    )  # fmt: skip
    types = {"k_view": described, "v_view": described, **pointers, "arrivals": "*i32"}
    types |= {"sequences": "i32", "scale_log2": "fp32", **dict.fromkeys(numbers, "i32")}
    fixed = stream_constants(8, group, columns, page, 256, plan, True, int(fp8), starts)
    return Variant(
        f"paged_decode gluon {name}", decode_kernel, types, fixed | dict(OVERLAP=True),
        {"num_warps": 4, "maxnreg": plan.most}, ("q", "out", "partial", "q_token", "q_head", "out_token", "out_head"),
        "mma", gluon=True,
    )  # fmt: skip


def _decode_plans() -> list[DecodePlan]:
    """Distinct decode plans; the number of programs does not affect the compiler."""
    return list(dict.fromkeys(plan._replace(per_sm=0) for plan in DECODE_PLANS))


EVERYTHING = dict(C=64, WIDTH=64, WINDOW=1024, SOFTCAP=30.0, SINKS=True, LSE=True, STARTS=True)
VARIANTS = [
    *(decode(f"128 page 16, {'x'.join(map(str, plan[:3]))}", plan) for plan in _decode_plans()),
    decode("128 page 64, 1024 sequences", DecodePlan(), PAGE=64, SEQUENCES=1024, LAST_ADDS=False),
    decode("128 fp8", DecodePlan(), "fp8e4nv", PAGE=64, SCALES=2),
    decode("64 everything", DecodePlan(), **EVERYTHING),
    decode("96", DecodePlan(), C=96),
    decode("256", DecodePlan(block=32), C=256, WIDTH=256),
    decode("128 four queries", DecodePlan(), QUERIES=4, STARTS=True),
    decode(
        "128 eight queries, groups of 8",
        DecodePlan(),
        expect="wgmma",
        QUERIES=8,
        GROUP=8,
        ROWS=64,
        STARTS=True,
    ),
    add_up(),
    decode_gluon("128 page 64"),
    decode_gluon("128 page 16, groups of 2", group=2, page=16),
    decode_gluon("128 page 64, several queries", starts=1),
    decode_gluon("128 page 64, several queries, fp8", fp8=True, starts=1),
    decode_gluon("128 page 64, single queries among others, fp8", fp8=True, starts=2),
    decode_gluon("128 page 64, fp8", fp8=True),
    decode_gluon("128 page 64, fp8, beside", group=2, fp8=True, beside=True),
    decode_gluon("64 page 128, fp8", columns=64, page=128, fp8=True),
    decode_gluon("64 page 128, groups of 16", group=16, columns=64, page=128),
    *(
        prefill(f"128 {'x'.join(map(str, plan[:4]))}{' tma' if plan.tma else ''}", plan)
        for plan in PREFILL_PLANS
    ),
    prefill("128 behind all keys", PrefillPlan(64, 64, 4, 3), ALL=True, LSE=True),
    prefill("128 fp8", PrefillPlan(tma=False), "fp8e4nv", SCALES=2),
    prefill("128 fp8 tma", PREFILL_8_BITS, "fp8e4nv", SCALES=1),
    prefill("64 everything", PrefillPlan(tma=False), **EVERYTHING),
    prefill("96", PrefillPlan(tma=False), C=96),
    prefill("256", PrefillPlan(128, 32, 8, 2, False), C=256, WIDTH=256),
    gluon("128 page 16", 16),
    gluon("64 page 32, groups of 2", 32, columns=64, group=2),
    gluon("128 page 256, no ping-pong", 256, ping_pong=False),
    gluon("128 page 64, groups of 8, sinks", 64, group=8, more=True),
]


def tuned_variants() -> Iterator[Variant]:
    for entry, how in shipped("paged_attention"):
        numbers, fp8 = numbers_of(entry), "float8" in entry
        columns, page = numbers["columns"], numbers["page"]
        cache, scales = ("fp8e4nv", 2) if fp8 else ("bf16", 0)
        wide = dict(C=columns, WIDTH=power_of_2(columns), SCALES=scales)
        if entry.startswith("decode"):
            plan = DecodePlan(**how)._replace(per_sm=0)
            sizes = f"{'x'.join(map(str, plan[:3]))}, {numbers['rows']} rows{' fp8' * fp8}"
            expect: Expect = "wgmma" if numbers["rows"] >= 64 else "mma"
            yield decode(
                f"{columns} page {page}, {sizes}", plan, cache, expect, PAGE=page,
                ROWS=numbers["rows"], **wide,
            )  # fmt: skip
        elif how["gluon"]:
            form = "" if how["ping_pong"] else ", no ping-pong"
            yield gluon(f"{columns} page {page}{form}", page, columns, ping_pong=how["ping_pong"])
        else:
            plan = PrefillPlan(**how)
            sizes = f"{'x'.join(map(str, plan[:4]))}{' tma' * plan.tma}{' fp8' * fp8}"
            yield prefill(f"{columns} {sizes}", plan, cache, **wide)
