"""Products on a GPU, bf16 and fp8: right at odd sizes, exact on integers, the same every time."""

import pytest
import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.cases.matmul import CANDIDATES, FLAT
from cairn.kernels.cases.matmul_fp8 import CANDIDATES as FP8_CANDIDATES
from cairn.kernels.matmul.epilogue import Epilogue, matmul_reference
from cairn.kernels.matmul.matmul import FEW, _key, matmul
from cairn.kernels.matmul.matmul_fp8 import _key as fp8_key
from cairn.kernels.matmul.matmul_fp8 import matmul_fp8, matmul_fp8_reference
from cairn.kernels.quantize.quantize import by_largest
from cairn.kernels.tuned import trying

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
FP8 = torch.float8_e4m3fn


def operands(m, n, k, dtype=BF16):
    a = torch.randn(m, k, device="cuda").to(dtype)
    return a, (torch.randn(n, k, device="cuda") * k**-0.5).to(dtype)


def integers(m, n, k, dtype=BF16):
    """Small enough that every sum is exact in float32 and in the results' type."""
    a = torch.randint(-2, 3, (m, k), device="cuda").to(dtype)
    return a, torch.randint(-2, 3, (n, k), device="cuda").to(dtype)


def truth(a, b, **parts):
    wide = {
        name: part.double() if isinstance(part, torch.Tensor) else part
        for name, part in parts.items()
    }
    return matmul_reference(a.double(), b, Epilogue(**wide), torch.float64)


class TestMatmul:
    @pytest.mark.parametrize("tiles", [*CANDIDATES, FLAT, FEW], ids=lambda tiles: tiles.name())
    def test_every_candidate(self, tiles):
        m, n, k = 1000, 1416, 520
        a, b = operands(m, n, k)
        y = torch.empty(m, n, device="cuda", dtype=BF16)
        poison(y)
        with trying("matmul", _key(m, n, k, BF16, Epilogue()), tiles._asdict()):
            matmul(a, b, out=y, impl="triton")
        assert relative_error(y, truth(a, b)) < 1e-2

    @pytest.mark.parametrize("swiglu", [False, True])
    @pytest.mark.parametrize("shape", [(300, 784, 200), (4096, 6144, 1024)])
    def test_epilogues(self, swiglu, shape):
        m, n, k = shape
        a, b = operands(m, n, k)
        columns = n // 2 if swiglu else n
        parts = dict(
            bias_N=torch.randn(n, device="cuda", dtype=BF16),
            activation="swiglu" if swiglu else None,
            residual_MN=torch.randn(m, columns, device="cuda", dtype=BF16),
        )
        y = matmul(a, b, **parts, impl="triton")
        assert relative_error(y, truth(a, b, **parts)) < 1e-2
        assert torch.equal(y, matmul(a, b, **parts, impl="triton"))

    def test_other_types(self):
        a, b = operands(300, 400, 512, torch.float16)
        assert relative_error(matmul(a, b, impl="triton"), truth(a, b)) < 1e-3
        a, b = operands(4000, 4096, 512)
        y = matmul(a, b, out_dtype=torch.float32, impl="triton")
        assert relative_error(y, truth(a, b)) < 1e-5
        scale = torch.tensor(0.004, device="cuda")
        y = matmul(a, b, out_scale=scale, impl="triton")
        assert relative_error(y.float(), truth(a, b, out_scale=scale)) < 5e-2

    def test_integers_are_exact(self):
        a, b = integers(1024, 2048, 64)
        assert torch.equal(matmul(a, b, impl="triton"), (a.float() @ b.float().T).to(BF16))


class TestFp8:
    @pytest.mark.parametrize("tiles", FP8_CANDIDATES, ids=lambda tiles: tiles.name())
    def test_every_candidate(self, tiles):
        m, n, k = 500, 1416, 1040
        wide_a, wide_b = operands(m, n, k, torch.float32)
        a, b = (by_largest(x, x.abs().amax(-1, keepdim=True), FP8) for x in (wide_a, wide_b))
        y = torch.empty(m, n, device="cuda", dtype=BF16)
        poison(y)
        with trying("matmul_fp8", fp8_key(m, n, k, True), tiles._asdict()):
            matmul_fp8(a.values, b.values, a.scale, b.scale, out=y, impl="triton")
        wide = torch.float64
        exact = matmul_fp8_reference(a.values, b.values, a.scale, b.scale, wide, wide)
        assert relative_error(y, exact) < 1e-2

    def test_agrees_with_cublas(self):
        a, b = operands(512, 1024, 512, torch.float32)
        a, b = a.to(FP8), (b * 16).to(FP8)
        for scales in ((), (1,)):
            scale_a = torch.rand(512 if scales else 1, device="cuda")
            scale_b = torch.rand(1024 if scales else 1, device="cuda")
            ours, theirs = (matmul_fp8(a, b, scale_a, scale_b, impl=i) for i in ("triton", "torch"))
            assert relative_error(ours, theirs) < 5e-3

    def test_integers_are_exact(self):
        a, b = integers(128, 512, 256, FP8)
        one = torch.ones((), device="cuda")
        y = matmul_fp8(a, b, one, one, out_dtype=torch.float32, impl="triton")
        assert torch.equal(y, a.float() @ b.float().T)
