"""The variants of `matmul` that are compiled and the shapes at which it is measured and tuned."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.matmul.epilogue import Activation, Epilogue, matmul_reference, with_epilogue
from cairn.kernels.matmul.matmul import (
    FEW,
    LARGE,
    PAIR,
    SMALL,
    _constants,
    _key,
    _matmul_kernel,
    cost,
    matmul,
)
from cairn.kernels.matmul.projections import QWEN3_06B, QWEN3_8B
from cairn.kernels.tiles import Tiles
from cairn.kernels.tuned import Tuning, shipped

KERNEL = "cairn.kernels.matmul.matmul"


TALL = Tiles(block_m=256, block_n=128)


FLAT = LARGE._replace(stages=3, flatten=True)  # not with SwiGLU: ptxas would serialise the products


CANDIDATES = [
    LARGE,
    LARGE._replace(group=4),
    LARGE._replace(group=16),
    LARGE._replace(stages=3),
    TALL,
    SMALL,
]


def _variant(
    name: str,
    tiles: Tiles,
    activation: Activation | None = None,
    c: str = "bf16",
    **given: str,
) -> Variant:
    half, swiglu = tiles.block_n // 2, activation == "swiglu"
    types = {
        "a": f"tensordesc<bf16[{tiles.block_m}, {tiles.block_k}]>",
        "b": f"tensordesc<bf16[{half if swiglu else tiles.block_n}, {tiles.block_k}]>",
        "c": f"tensordesc<{c}[{tiles.block_m}, {half}]>",
        **dict.fromkeys("MNK", "i32"),
        **given,
    }
    if "residual" in given:
        types["residual"] = types["c"]
    absent = dict.fromkeys({"bias", "residual", "out_scale"} - given.keys())
    constants = {**_constants(tiles, activation), **absent}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    aligned = tuple(part for part in ("M", "N", "K", "bias", "out_scale") if part in types)
    return Variant(name, _matmul_kernel, types, constants, options, aligned, "wgmma")


COMPILED = [  # the order of tiles is no matter of code
    LARGE,
    LARGE._replace(stages=3),
    TALL,
    SMALL,
    FEW,
]


VARIANTS = [
    *(_variant(f"matmul {tiles.name()}", tiles) for tiles in (*COMPILED, FLAT)),
    _variant("matmul + bias", LARGE, bias="*bf16"),
    _variant("matmul + residual", LARGE, residual="as c"),
    _variant("matmul + bias + residual", SMALL, bias="*bf16", residual="as c"),
    _variant("matmul to float32", LARGE._replace(stages=3), c="fp32"),
    _variant("matmul + quantise", LARGE, c="fp8e4nv", out_scale="*fp32"),
    *(_variant(f"matmul + swiglu {tiles.name()}", tiles, "swiglu") for tiles in COMPILED),
    _variant("matmul + bias + gelu", PAIR, "gelu", bias="*bf16"),
    _variant("matmul + swiglu + bias", LARGE, "swiglu", bias="*bf16"),
    _variant("matmul + swiglu + quantise", LARGE, "swiglu", c="fp8e4nv", out_scale="*fp32"),
]


def tuned_variants() -> Iterator[Variant]:
    for entry, how in shipped("matmul"):
        tiles = Tiles(**{name: how[name] for name in Tiles._fields})
        swiglu = entry.endswith("swiglu")
        if how["impl"] == "triton":
            name = f"matmul {'+ swiglu ' if swiglu else ''}{tiles.name()}"
            yield _variant(name, tiles, "swiglu" if swiglu else None)


SQUARE = [(8192, 8192, 8192), (8192, 8192, 1024), (8192, 28672, 4096)]


TRAINING = [(8192, p.n, p.k) for p in QWEN3_8B]


GATED = [(8192, p.n, p.k) for p in (*QWEN3_8B, *QWEN3_06B) if p.name == "gate_up"]


def _operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    a_MK = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    return a_MK, torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5


def tuning() -> Iterator[Tuning]:
    shapes = dict.fromkeys((*SQUARE, *TRAINING, *GATED))
    for m, n, k in shapes:
        gated = (m, n, k) in GATED
        for epilogue in (Epilogue(), Epilogue(activation="swiglu")) if gated else (Epilogue(),):

            def prepare(
                m: int = m, n: int = n, k: int = k, epilogue: Epilogue = epilogue
            ) -> Callable[[], Tensor]:
                a_MK, b_NK = _operands(m, n, k)
                return lambda: matmul(a_MK, b_NK, activation=epilogue.activation)

            choices = CANDIDATES if epilogue.activation else [*CANDIDATES, FLAT]
            candidates = [{**tiles._asdict(), "impl": "triton"} for tiles in choices]
            key = _key(m, n, k, torch.bfloat16, epilogue)
            yield Tuning(key, [*candidates, {"impl": "torch"}], prepare)


def cases() -> Iterator[Case]:
    for m, n, k in (*SQUARE, *TRAINING):
        shape = f"{m} x {n} x {k}"
        yield Case("matmul", shape, "bf16", cost(m, n, k), lambda s=(m, n, k): _prepare(*s))
    swiglu, residual = (8192, 24576, 4096), (8192, 4096, 12288)
    yield Case("matmul + swiglu", " x ".join(map(str, swiglu)), "bf16",
               cost(*swiglu, swiglu=True),
               lambda: _prepare(*swiglu, activation="swiglu"))  # fmt: skip
    yield Case("matmul + residual", " x ".join(map(str, residual)), "bf16",
               cost(*residual, residual=True),
               lambda: _prepare(*residual, residual=True))  # fmt: skip


def _prepare(
    m: int, n: int, k: int, activation: Activation | None = None, residual: bool = False
) -> Prepared:
    a_MK, b_NK = _operands(m, n, k)
    beside = torch.randn(m, n, device="cuda", dtype=torch.bfloat16) if residual else None
    epilogue = Epilogue(activation=activation, residual_MN=beside)
    y_MN = torch.empty(m, epilogue.columns(n), device="cuda", dtype=torch.bfloat16)

    def ours() -> Tensor:
        return matmul(
            a_MK, b_NK, activation=activation, residual_MN=beside, out=y_MN, impl="triton"
        )

    def error() -> float:
        poison(y_MN)
        rows = slice(None, None, max(1, m // 1024))  # an eighth of the rows is enough for the truth
        part = None if beside is None else beside[rows].double()
        truth = Epilogue(activation=activation, residual_MN=part)
        return relative_error(
            ours()[rows], matmul_reference(a_MK[rows].double(), b_NK, truth, torch.float64)
        )

    anchors = {
        "cuBLAS": lambda: matmul(
            a_MK, b_NK, activation=activation, residual_MN=beside, impl="torch"
        )
    }
    if activation:
        compiled = torch.compile(lambda a, b: with_epilogue(a, b, epilogue, a.dtype))
        anchors["cuBLAS + torch.compile"] = lambda: compiled(a_MK, b_NK)
    return Prepared(ours, anchors, error)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
