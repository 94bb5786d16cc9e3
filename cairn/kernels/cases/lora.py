"""The variants of `lora` that are compiled and the shapes at which it is measured."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cairn.kernels.accuracy import relative_error
from cairn.kernels.adapter.expand import _expand_kernel, _gated_kernel
from cairn.kernels.adapter.lora import cost, lora_add, lora_add_reference
from cairn.kernels.adapter.shrink import _shrink_kernel
from cairn.kernels.adapter.slots import entry_of, tiles_of
from cairn.kernels.adapter.table import ENTRY, PARTS, LoraTable, Tiles, Widest
from cairn.kernels.kernel import Case, Prepared, Variant

KERNEL = "cairn.kernels.adapter.lora"
RANK, MAPS = 16, 144
# Tokens, K, rows of the parts: q, k and v, and down of an 8B model.
SHAPES = ((256, 4096, (4096, 1024, 1024)), (256, 12288, (4096,)))


NUMBERS = ("map_number", "maps")


def _shrink_variant(block: int, width: int) -> Variant:
    types = dict(x="*bf16", entries="*i64", rows="*i32", tiles="*i32", h="*fp32", x_stride="i32")
    types |= dict(part_k="i32")
    constants = dict(
        WORDS=ENTRY,
        K=4096,
        H_WIDTH=width,
        BLOCK_M=block,
        BLOCK_R=width,
        BLOCK_K=256 if block == 16 else 128,
        IEEE=False,
        ALIGNED=True,
        OVERLAP=True,
    )
    name, options = f"lora shrink {block} x {width}", {"num_warps": 4, "num_stages": 3}
    arguments = {**types, "tokens": "i32", **dict.fromkeys(NUMBERS, "i32")}
    return Variant(name, _shrink_kernel, arguments, constants, options, tuple(types), "mma")


def _expand_variant(block: int, y: str, beside: bool = False) -> Variant:
    types = dict(
        y=y,
        h="*bf16" if beside else "*fp32",
        entries="*i64",
        scales="*fp32",
        rows="*i32",
        tiles="*i32",
    )
    types |= dict(like="*bf16", y_stride="i32", span_n="i32")
    constants = dict(
        WORDS=ENTRY,
        N_0=4096,
        N_1=1024,
        N_2=1024,
        H_WIDTH=48 if beside else 64,
        SPLIT=1 if beside else 8,
        BLOCK_M=block,
        BLOCK_R=16,
        BLOCK_N=128,
        IEEE=False,
        ALIGNED=True,
        BESIDE=beside,
        OVERLAP=True,
    )
    name = f"lora expand {block}, {y}{', beside' if beside else ''}"
    options = {"num_warps": 4, "num_stages": 1}
    arguments = {**types, "tokens": "i32", **dict.fromkeys(NUMBERS, "i32")}
    return Variant(name, _expand_kernel, arguments, constants, options, tuple(types), "mma")


def _gated_variant(beside: bool = False) -> Variant:
    h = "*bf16" if beside else "*fp32"
    types = dict(y="*bf16", out="*bf16", h=h, entries="*i64", scales="*fp32", rows="*i32")
    types |= dict(tiles="*i32", like="*bf16", y_stride="i32", out_stride="i32", span_n="i32")
    constants = dict(
        WORDS=ENTRY,
        F=12288,
        H_WIDTH=32,
        SPLIT=1 if beside else 8,
        BLOCK_M=16,
        BLOCK_R=16,
        BLOCK_N=64,
        IEEE=False,
        ALIGNED=True,
        BESIDE=beside,
        OVERLAP=True,
    )
    arguments = {**types, "tokens": "i32", **dict.fromkeys(NUMBERS, "i32")}
    options = {"num_warps": 4, "num_stages": 1}
    name = f"lora swiglu{', beside' if beside else ''}"
    return Variant(name, _gated_kernel, arguments, constants, options, tuple(types), "mma")


VARIANTS = [
    _gated_variant(),
    _gated_variant(beside=True),
    _shrink_variant(16, 16),
    _shrink_variant(64, 16),
    _expand_variant(16, "*bf16"),
    _expand_variant(64, "*fp32"),
    _expand_variant(16, "*bf16", beside=True),
]


def cases() -> Iterator[Case]:
    for tokens, width_k, part_rows in SHAPES:
        for adapters in (1, 8, 64):
            shape = f"{tokens} x {width_k} -> {sum(part_rows)}, {adapters} adapters"
            least = cost(tokens, width_k, sum(part_rows), RANK, adapters)
            yield Case("lora", shape, "bf16", least,
                       lambda s=(tokens, width_k, part_rows, adapters): _prepare(*s), graph=True)  # fmt: skip


def _prepare(tokens: int, width_k: int, part_rows: tuple[int, ...], adapters: int) -> Prepared:
    made = [_adapter(width_k, part_rows) for _ in range(adapters)]
    entries = torch.zeros(adapters + 1, 1, ENTRY, dtype=torch.int64)
    scales = torch.zeros(adapters + 1, 1, PARTS)
    for slot, (a_RK, parts) in enumerate(made, 1):
        words, factors = entry_of(a_RK, [(b_NR, scale) for _, b_NR, scale in parts])
        entries[slot, 0], scales[slot, 0] = torch.tensor(words), torch.tensor(factors)
    table = LoraTable(entries.cuda(), scales.cuda())
    slots = [1 + row % adapters for row in range(tokens)]
    rows, tiles, block = tiles_of(slots)
    sent = torch.tensor(rows).int().cuda(), torch.tensor(tiles).int().cuda()
    on_device = Tiles(*sent, block, aligned=True)
    x_MK = torch.randn(tokens, width_k, device="cuda", dtype=torch.bfloat16)
    y_MN = torch.randn(tokens, sum(part_rows), device="cuda", dtype=torch.bfloat16)
    widest = Widest(RANK * len(part_rows), RANK)

    def ours() -> Tensor:
        return lora_add(y_MN, x_MK, table, 0, part_rows, on_device, widest)

    def one_by_one() -> Tensor:
        for slot, (_, parts) in enumerate(made, 1):
            mine = slice(slot - 1, None, adapters)
            added = [scale * ((x_MK[mine] @ a.T) @ b.T) for a, b, scale in parts]
            y_MN[mine] += torch.cat(added, 1)
        return y_MN

    def error() -> float:
        fresh_MN = torch.randn_like(y_MN)
        exact = lora_add_reference(fresh_MN, x_MK, [None, *(p for _, p in made)], slots, part_rows)
        lora_add(fresh_MN, x_MK, table, 0, part_rows, on_device, widest)
        return relative_error(fresh_MN, exact)

    return Prepared(ours, {"torch, one by one": one_by_one}, error)


def _adapter(
    width_k: int, part_rows: tuple[int, ...]
) -> tuple[Tensor, list[tuple[Tensor, Tensor, float]]]:
    how = dict(device="cuda", dtype=torch.bfloat16)
    a_RK = torch.randn(RANK * len(part_rows), width_k, **how) / width_k**0.5
    return a_RK, [(a, torch.randn(rows, RANK, **how), 2.0)
                  for a, rows in zip(a_RK.split(RANK), part_rows, strict=True)]  # fmt: skip


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
