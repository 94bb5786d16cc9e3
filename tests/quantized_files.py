"""Quantised matrices as other programs store them, packed by numpy from each format's description, bit by bit.

Written without a look at the readers of `cairn.models.quantized`: a `Written` has the tensors of a file and the matrix
that they stand for, which is the oracle.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class Written(NamedTuple):
    tensors: dict[str, Tensor]  # by the last part of the name
    weight: Tensor  # float32 [N, K]


def words(values: np.ndarray, bits: int) -> Tensor:
    """Each row as a stream of bits, the lowest first, cut into words of 32."""
    rows = []
    for row in values:
        stream = "".join(format(int(value), f"0{bits}b")[::-1] for value in row)
        stream = stream.ljust(-(-len(stream) // 32) * 32, "0")
        rows.append([int(stream[i : i + 32][::-1], 2) for i in range(0, len(stream), 32)])
    return torch.from_numpy(np.array(rows, np.uint32).view(np.int32).copy())


def gptq(
    chance: np.random.Generator,
    rows: int,
    columns: int,
    *,
    bits: int = 4,
    group: int = 32,
    version: int = 1,
    order: bool = False,
    symmetric: bool = False,
) -> Written:
    count = columns // group
    levels_KN = chance.integers(0, 1 << bits, (columns, rows))
    zeros_GN = chance.integers(1, 1 << bits, (count, rows))
    if symmetric:
        zeros_GN[:] = 1 << bits - 1
    scales_GN = chance.uniform(0.01, 0.1, (count, rows)).astype(np.float16)
    g_idx = np.arange(columns) // group
    if order:
        chance.shuffle(g_idx)
    weight_KN = (levels_KN - zeros_GN[g_idx]) * scales_GN[g_idx].astype(np.float32)
    tensors = {
        "qweight": words(levels_KN.T, bits).T.contiguous(),
        "qzeros": words(zeros_GN - (version == 1), bits),
        "scales": torch.from_numpy(scales_GN),
        "g_idx": torch.from_numpy(g_idx.astype(np.int32)),
    }
    return Written(tensors, torch.from_numpy(weight_KN.T.astype(np.float32).copy()))


def awq(chance: np.random.Generator, rows: int, columns: int, group: int = 32) -> Written:
    def shuffled(values: np.ndarray) -> Tensor:
        """Nibble j of a word is the value at AWQ_ORDER[j]."""
        in_words = values.reshape(len(values), -1, 8)[..., AWQ_ORDER]
        return words(in_words.reshape(len(values), -1), 4)

    levels_KN = chance.integers(0, 16, (columns, rows))
    zeros_GN = chance.integers(0, 16, (columns // group, rows))
    scales_GN = chance.uniform(0.01, 0.1, zeros_GN.shape).astype(np.float16)
    wide = [np.repeat(plane, group, 0) for plane in (zeros_GN, scales_GN.astype(np.float32))]
    tensors = {
        "qweight": shuffled(levels_KN),
        "qzeros": shuffled(zeros_GN),
        "scales": torch.from_numpy(scales_GN),
    }
    weight_KN = (levels_KN - wide[0]) * wide[1]
    return Written(tensors, torch.from_numpy(weight_KN.T.astype(np.float32).copy()))


def packed_in_order(chance: np.random.Generator, rows: int, columns: int) -> Written:
    """compressed-tensors with the group of each column, as its releases before 0.20 wrote act order."""
    group = 32
    g_idx = np.arange(columns) // group
    chance.shuffle(g_idx)
    levels_NK = chance.integers(-8, 8, (rows, columns))
    scales_NG = torch.from_numpy(chance.uniform(0.01, 0.1, (rows, columns // group))).bfloat16()
    tensors = {
        "weight_packed": words(levels_NK + 8, 4),
        "weight_scale": scales_NG,
        "weight_shape": torch.tensor([rows, columns]),
        "weight_g_idx": torch.from_numpy(g_idx.astype(np.int32)),
    }
    weight = torch.from_numpy(levels_NK).float() * scales_NG.float()[:, g_idx]
    return Written(tensors, weight)


def fp8(
    chance: np.random.Generator, rows: int, columns: int, block: tuple[int, int] | None = (32, 64)
) -> Written:
    """transformers' own: blocks, or one scale for the matrix."""
    levels_NK = torch.from_numpy(chance.normal(0, 40, (rows, columns))).to(torch.float8_e4m3fn)
    high, wide = block or (rows, columns)
    shape = (-(-rows // high), -(-columns // wide))
    scales = torch.from_numpy(chance.uniform(1e-3, 3e-3, shape).astype(np.float32))
    spread = scales.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
    stored = scales if block else scales.reshape(())
    tensors = {"weight": levels_NK, "weight_scale_inv": stored}
    if block is None:
        tensors["activation_scale"] = torch.tensor(0.04)
    return Written(tensors, levels_NK.float() * spread)


def fbgemm_fp8(chance: np.random.Generator, rows: int, columns: int) -> Written:
    made = fp8(chance, rows, columns, (1, columns))
    scale = made.tensors["weight_scale_inv"]
    assert scale.shape == (rows, 1)
    return Written({"weight": made.tensors["weight"], "weight_scale": scale}, made.weight)


def modelopt_fp8(chance: np.random.Generator, rows: int, columns: int) -> Written:
    made = fp8(chance, rows, columns, None)
    scale = made.tensors["weight_scale_inv"]
    tensors = {
        "weight": made.tensors["weight"],
        "weight_scale": scale,
        "input_scale": torch.tensor(0.04),
    }
    return Written(tensors, made.weight)


def modelopt_nvfp4(chance: np.random.Generator, rows: int, columns: int) -> Written:
    codes_NK, values_NK = _e2m1(chance, rows, columns)
    scales = torch.from_numpy(chance.uniform(16, 300, (rows, columns // 16))).to(
        torch.float8_e4m3fn
    )
    whole = torch.tensor(2e-4)
    tensors = {
        "weight": _bytes(codes_NK),
        "weight_scale": scales,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(0.01),
    }
    spread = (scales.float() * whole).repeat_interleave(16, 1)
    return Written(tensors, torch.from_numpy(values_NK) * spread)


def mxfp4_blocks(chance: np.random.Generator, rows: int, columns: int) -> Written:
    """One expert of gpt-oss: blocks [rows, columns / 32, 16] and scales."""
    codes_NK, values_NK = _e2m1(chance, rows, columns)
    exponents = chance.integers(118, 126, (rows, columns // 32))
    spread = np.repeat(2.0 ** (exponents - 127.0), 32, 1).astype(np.float32)
    tensors = {
        "blocks": _bytes(codes_NK).view(rows, -1, 16),
        "scales": torch.from_numpy(exponents.astype(np.uint8)),
    }
    return Written(tensors, torch.from_numpy(values_NK * spread))


def _e2m1(chance: np.random.Generator, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    codes = chance.integers(0, 16, (rows, columns))
    return codes, np.where(codes >= 8, -1, 1).astype(np.float32) * E2M1[codes % 8]


def _bytes(codes_NK: np.ndarray) -> Tensor:
    """The even column in the low half of a byte."""
    return torch.from_numpy((codes_NK[:, ::2] + 16 * codes_NK[:, 1::2]).astype(np.uint8))


class Case(NamedTuple):
    """A format, and the quantization_config that says so."""

    config: dict[str, object]
    write: Callable[[np.random.Generator, int, int], Written]


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
CASES = {
    "gptq": Case(GPTQ, gptq),
    "gptq-symmetric": Case(GPTQ | {"sym": True}, lambda *a: gptq(*a, symmetric=True)),
    "gptq-order": Case(GPTQ | {"desc_act": True}, lambda *a: gptq(*a, order=True)),
    "gptq-v2": Case(GPTQ | {"checkpoint_format": "gptq_v2"}, lambda *a: gptq(*a, version=2)),
    "gptq-8-bits": Case(GPTQ | {"bits": 8}, lambda *a: gptq(*a, bits=8)),
    "gptq-3-bits": Case(GPTQ | {"bits": 3}, lambda *a: gptq(*a, bits=3)),
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMM"}, awq),
    "fp8": Case({"quant_method": "fp8", "weight_block_size": [32, 64]}, fp8),
    "fp8-tensor": Case(
        {"quant_method": "fp8", "activation_scheme": "static"}, lambda *a: fp8(*a, None)
    ),
    "fbgemm-fp8": Case({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fbgemm_fp8),
    "modelopt-fp8": Case({"quant_method": "modelopt", "quant_algo": "FP8"}, modelopt_fp8),
    "modelopt-nvfp4": Case(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head*"]},
        modelopt_nvfp4,
    ),
    "packed-order": Case(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "g": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "strategy": "group", "group_size": 32},
                }
            },
            "ignore": ["lm_head"],
        },
        packed_in_order,
    ),
}
