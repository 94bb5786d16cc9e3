"""Products with GGUF blocks as the file has them, against the weights that the `gguf` package dequantises."""

import os
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.core.errors import HardwareError
from cairn.kernels.cpu import compiled
from cairn.kernels.cpu.packed_product import TYPES, Blocks, NormWeight
from cairn.models.activation import Gate
from cairn.models.linear.blocks import FLOAT_ROWS, BlocksForm
from cairn.models.linear.form import Epilogue

pytestmark = pytest.mark.skipif(compiled.obstacle() is not None, reason=str(compiled.obstacle()))
# A row rounded to 16 bits errs by 1/32,512 of its largest value in 256 over sqrt(12): 0.003% of its length.
ROUNDING = 1e-4
KINDS = sorted(TYPES)


def block_of(kind: str) -> tuple[int, int]:
    return gguf.constants.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]


def blocks_of(kind: str, rows: int, columns: int, seed: int = 0) -> tuple[Blocks, torch.Tensor]:
    """Random bytes are blocks of every type, once their scales are finite; and the matrix that they stand for."""
    values, size = block_of(kind)
    chance = np.random.default_rng(seed)
    raw = chance.integers(0, 256, (rows, columns // values, size), dtype=np.uint8)
    for at in _scales_at(kind):
        scale = chance.uniform(0.001, 0.01, (rows, columns // values)).astype(np.float16)
        raw[:, :, at : at + 2] = scale[..., None].view(np.uint8)
    raw = raw.reshape(rows, -1)
    weight = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind])
    return Blocks(kind, torch.from_numpy(raw), columns), torch.from_numpy(np.array(weight))


def _scales_at(kind: str) -> tuple[int, ...]:
    """Where the halves of a block are that everything else is multiplied with."""
    places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2)}
    return places.get(kind, (0, 2) if kind in ("Q4_1", "Q5_1") else (0,))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-9))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_what_gguf_dequantises(kind):
    blocks, weight_NK = blocks_of(kind, 9, 512)
    found = BlocksForm([blocks]).rows(torch.tensor([8, 0, 3, 3]))
    torch.testing.assert_close(found, weight_NK[[8, 0, 3, 3]], rtol=1e-5, atol=1e-6)
    two_maps, both_NK = BlocksForm([blocks, blocks]), torch.cat([weight_NK, weight_NK])
    for some in (slice(7, 12), slice(None), slice(9, 100)):
        torch.testing.assert_close(two_maps[some], both_NK[some], rtol=1e-5, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 70),
    blocks=st.integers(1, 5),
    tokens=st.sampled_from([1, 2, 3, 4, 5, 7, 8, 9, 16, FLOAT_ROWS - 1, FLOAT_ROWS, 70]),
)
def test_a_product_errs_by_the_rounding_of_its_activations(kind, rows, blocks, tokens):
    columns = blocks * block_of(kind)[0]
    packed, weight_NK = blocks_of(kind, rows, columns, seed=rows)
    x_MK = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens))
    bias_N = torch.linspace(-1, 1, rows)
    found = BlocksForm([packed]).product(x_MK, bias_N)
    size = x_MK.norm() * weight_NK.norm() / columns**0.5
    assert float((found - F.linear(x_MK, weight_NK, bias_N)).norm() / size) < ROUNDING


@pytest.mark.parametrize("tokens", [1, 6, FLOAT_ROWS])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_norm_gate_and_residual_in_one_call_are_the_separate_steps(tokens, activation):
    parts = [blocks_of(kind, 40, 256, seed) for seed, kind in enumerate(("Q4_K", "Q6_K"))]
    weight_NK = torch.cat([weight for _, weight in parts])
    chance = torch.Generator().manual_seed(tokens)
    x_MK = torch.randn(tokens, 256, generator=chance)
    residual_MN = torch.randn(tokens, 80, generator=chance)
    norm = NormWeight(torch.linspace(0.5, 1.5, 256), 1e-5)
    form = BlocksForm([blocks for blocks, _ in parts])
    normed_MK = F.rms_norm(x_MK, (256,), norm.weight_K, 1e-5)
    gate = Gate(activation, gated=True)
    expected = gate.plain(F.linear(normed_MK, weight_NK))
    assert error(form.fused(x_MK, gate=gate, norm=norm), expected) < 4 * ROUNDING
    assert error(form.product(normed_MK, None, Epilogue(gate=gate)), expected) < 4 * ROUNDING
    summed = residual_MN + F.linear(normed_MK, weight_NK)
    found = form.fused(x_MK, norm=norm, onto_MN=residual_MN)
    assert found.data_ptr() == residual_MN.data_ptr()
    assert error(found, summed) < ROUNDING


def test_one_thread_and_several_compute_the_same_bits():
    packed, _ = blocks_of("Q4_K", 500, 512)
    x_MK, before = torch.randn(5, 512), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found += [BlocksForm([packed]).product(x_MK) for _ in range(20)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_whatever_rows_are_beside_it(kind):
    size = block_of(kind)[0]
    for columns in [256 + blocks * size for blocks in ((1, 2, 3) if size == 32 else (1,))]:
        packed, _ = blocks_of(kind, 62, columns)
        x_MK, form = torch.randn(15, columns), BlocksForm([packed])
        alone = torch.cat([form.product(row_K[None]) for row_K in x_MK])
        for rows in (2, 3, 4, 5, 6, 8, 9, 15):
            assert torch.equal(form.product(x_MK[:rows]), alone[:rows])


def test_without_a_compiler_one_line_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(HardwareError, match="no C compiler"):
        compiled.library.__wrapped__()


def test_a_compiler_that_fails_is_quoted_in_one_line(monkeypatch, tmp_path):
    broken = tmp_path / "broken-cc"
    broken.write_text("#!/bin/sh\necho 'product.c:1: error: no such thing' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises(HardwareError, match="error: no such thing"):
        compiled.library.__wrapped__()
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_compiling_is_announced_once(monkeypatch, tmp_path, capfd):
    built = compiled.library()._name
    copying = tmp_path / "copying-cc"
    copying.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp {built} "$2"\n')
    copying.chmod(0o755)
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(copying))
    compiled._said.cache_clear()
    compiled.library.__wrapped__()
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert str(tmp_path / "cache" / "kernels") in said
    compiled.library.__wrapped__()
    assert not capfd.readouterr().err


@pytest.mark.skipif(
    not hasattr(compiled.library(), "cairn_use_kernel"), reason="one library has every type here"
)
def test_only_the_types_of_a_model_are_compiled(tmp_path):
    """A second for each of them; all fourteen would keep the first start waiting for twenty."""
    code = (
        "import torch; from test_gguf_blocks_cpu import blocks_of, error; "
        "from cairn.models.linear.blocks import BlocksForm; blocks, weight = blocks_of('Q2_K', 8, 256); "
        "x = torch.randn(3, 256); found = BlocksForm([blocks]).product(x); "
        "raise SystemExit(error(found, x @ weight.T) > 1e-4)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=__file__.rpartition("/")[0],
        env={**os.environ, "CAIRN_CACHE": str(tmp_path)},
        timeout=100,
        check=False,
    )
    assert done.returncode == 0
    made = sorted(file.name.rpartition("-")[0] for file in (tmp_path / "kernels").iterdir())
    assert made == ["kind-UNPACKED", "product"]


def test_a_forked_process_multiplies_with_threads_of_its_own():
    code = (
        "import os, torch; from test_gguf_blocks_cpu import blocks_of; "
        "from cairn.models.linear.blocks import BlocksForm; torch.set_num_threads(2); "
        "form = BlocksForm([blocks_of('Q4_0', 300, 256)[0]]); x = torch.ones(2, 256); y = form.product(x); "
        "child = os.fork(); same = torch.equal(form.product(x), y); "
        "os._exit(not same) if child == 0 else None; "
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=__file__.rpartition("/")[0], timeout=110, check=False
    )
    assert done.returncode == 0
