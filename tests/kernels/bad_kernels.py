"""Kernels that are wrong on purpose, each in one way: what `lint` is there to catch."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from cairn.kernels.kernel import Variant

POINTERS = {"a": "*bf16", "b": "*bf16", "c": "*bf16"}
SIZES = {"M": "i32", "N": "i32", "K": "i32"}
ALIGNED = ("a", "b", "c", "M", "N", "K")


@triton.jit
def by_pointers(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXACT: tl.constexpr
):
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    total = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        left = tl.load(a + row[:, None] * K + (k + inner)[None, :])
        right = tl.load(b + (k + inner)[:, None] * N + column[None, :])
        if EXACT:
            total += tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
        else:
            total = tl.dot(left, right, total)
    tl.store(c + row[:, None] * N + column[None, :], total.to(tl.bfloat16))


@gluon.jit
def _counts(c, count, first):
    for at in range(count):
        gl.store(c + first + at, at.to(gl.bfloat16))


@gluon.jit
def by_two_warps(a, b, c, M, N, K, USED: gl.constexpr):
    """A barrier is made before numbers are handed to another warp, and waited for or forgotten."""
    done = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(done.index(0), count=1)
    count = gl.load(a).to(gl.int32)  # only this warp has it, so that it is handed over
    gl.warp_specialize([(_counts, (c, count, 0)), (_counts, (c, count, N))], [1], [24])
    if USED:
        mbarrier.arrive(done.index(0), count=1)


@triton.jit
def by_tiles(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        total = tl.dot(a.load([row, k]), b.load([column, k]).T, total)
    c.store([row, column], total.to(tl.bfloat16))


@triton.jit
def broken(a, N: tl.constexpr):
    tl.store(a + tl.arange(0, N), tl.load(a + tl.arange(0, N + N)))


def matmul(name: str, m: int, n: int, k: int, *, exact: bool = False, **options: int) -> Variant:
    constants = {"BM": m, "BN": n, "BK": k, "EXACT": exact}
    return Variant(name, by_pointers, {**POINTERS, **SIZES}, constants, options, ALIGNED, "wgmma")


GOOD = matmul("good", 128, 128, 64, num_warps=8, num_stages=3)
SPILLS = matmul("spills", 128, 128, 64, num_warps=4, num_stages=2, maxnreg=144)
TOO_MUCH_SHARED = matmul("too much shared memory", 128, 256, 64, num_warps=8, num_stages=7)
ORDINARY_CORES = matmul("ordinary cores", 32, 32, 32, exact=True, num_warps=4, num_stages=2)
ONLY_MMA = matmul("only mma", 16, 64, 64, num_warps=4, num_stages=2)
SERIALISED = Variant(
    "serialised",
    by_tiles,
    {
        "a": "tensordesc<bf16[128, 64]>",
        "b": "tensordesc<bf16[256, 64]>",
        "c": "tensordesc<bf16[128, 256]>",
        **SIZES,
    },
    {"BM": 128, "BN": 256, "BK": 64},
    {"num_warps": 8, "num_stages": 3},
    ("M", "N", "K"),
    "wgmma",
)
BROKEN = Variant("broken", broken, {"a": "*fp32"}, {"N": 64})


def two_warps(name: str, used: bool) -> Variant:
    return Variant(
        name,
        by_two_warps,
        {**POINTERS, **SIZES},
        {"USED": used},
        {"num_warps": 4},
        ALIGNED,
        gluon=True,
    )


FORGOTTEN_BARRIER = two_warps("forgotten barrier", used=False)
USED_BARRIER = two_warps("used barrier", used=True)
