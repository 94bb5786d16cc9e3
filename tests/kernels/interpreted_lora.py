"""Adapters of many rows in the interpreter, each with its own rank, against the loop that defines them."""

from cairn.kernels.interpret import reachable  # isort: skip
from types import SimpleNamespace

import pytest
import tiny_adapters
import tiny_checkpoints
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.adapter import expand, lora, shrink
from cairn.kernels.adapter import table as tables
from cairn.kernels.adapter.lora import lora_add, lora_add_beside, lora_add_reference
from cairn.kernels.adapter.slots import entry_of, is_aligned, tiles_of
from cairn.kernels.adapter.table import LoraTable, Tiles, Widest
from cairn.models.activation import Gate
from cairn.models.adapter.spec import AdapterSpec
from cairn.models.checkpoint import open_checkpoint
from cairn.models.linear.form import Epilogue
from cairn.serve.engine import adapter_slots
from cairn.serve.engine.adapter_columns import AdapterColumns
from cairn.serve.engine.adapter_slots import AdapterSlots
from cairn.serve.engine.adapters import Adapters
from cairn.serve.engine.request import Limits

MAPS, MAP = 2, 1


def adapter(ranks, part_rows, width, dtype):
    """A of all parts stacked, B of each part, and their scales."""
    a_RK = (torch.randn(sum(ranks), width) / width**0.5).to(dtype)
    parts, start = [], 0
    for rank, rows in zip(ranks, part_rows, strict=True):
        b_NR = torch.randn(rows, rank).to(dtype)
        parts.append((a_RK[start : start + rank], b_NR, 0.5 + rank / 8))
        start += rank
    return a_RK, parts


@pytest.mark.parametrize(
    ("tokens", "width", "part_rows", "dtype", "onto"),
    [
        (21, 48, (40, 16, 16), torch.float32, "product"),
        (21, 48, (40, 16, 16), torch.bfloat16, "aligned"),
        (7, 48, (40, 16, 16), torch.bfloat16, "product"),  # odd ranks
        (5, 520, (136,), torch.bfloat16, "parts"),
        (70, 16, (24, 24), torch.float32, "product"),
        (21, 48, (40, 16, 16), torch.bfloat16, "beside"),
    ],
)
def test_rows_get_what_their_adapter_adds(tokens, width, part_rows, dtype, onto, monkeypatch):
    for module in (tables, shrink):
        monkeypatch.setattr(module, "FEW_TOKENS", 32)  # the last case has large tiles
    monkeypatch.setattr(expand, "BROADEST", 16)
    for name in ("ADDED", "GATED"):  # a program has several blocks
        monkeypatch.setattr(expand, name, getattr(expand, name)._replace(programs=16))
    ranks = [(4,) * len(part_rows), (17, *[0] * (len(part_rows) - 1)), (1, 3, 2)[: len(part_rows)]]
    if aligned := onto == "aligned":
        ranks = [(8, 8, 8), (16, 0, 0), (0, 8, 24)]
    made = [adapter(one, part_rows, width, dtype) for one in ranks]
    table = LoraTable(torch.zeros(4, MAPS, 8, dtype=torch.int64), torch.zeros(4, MAPS, 3))
    for slot, (a_RK, parts) in enumerate(made, 1):
        tensors = [(b_NR, scale) for _, b_NR, scale in parts]
        words, scales = entry_of(a_RK, tensors)
        table.entries_SME[slot, MAP] = torch.tensor(words)
        table.scales_SMP[slot, MAP] = torch.tensor(scales)
    slots = torch.randint(0, 4, (tokens,)).tolist()
    rows, tiles, block = tiles_of(slots, spare=3, positions={1: 2, 2: 0, 3: 1})
    on_device = Tiles(torch.tensor(rows).int(), torch.tensor(tiles).int(), block, aligned, 3)
    x_MK = torch.randn(tokens, width + 3).to(dtype)[:, :width]
    y_MN = torch.randn(tokens, sum(part_rows)).to(torch.float32 if onto == "parts" else dtype)
    exact = lora_add_reference(y_MN, x_MK, [None, *(parts for _, parts in made)], slots, part_rows)
    untouched = y_MN.clone()
    there = {f"a{n}": a_RK for n, (a_RK, _) in enumerate(made)}
    there |= {
        f"b{n}{i}": part[1]
        for n, (_, parts) in enumerate(made)
        for i, part in enumerate(parts)
        if part[1].numel()
    }
    with reachable(**there):
        if onto == "beside":
            behind = [torch.full((tokens, 32), torch.nan, dtype=dtype) for _ in range(3)]
            for position, slot in enumerate((2, 3, 1)):
                a_RK = made[slot - 1][0]
                behind[position][:, : len(a_RK)] = x_MK @ a_RK.T
            wide_MN = torch.cat([y_MN, *behind], 1)
            found = lora_add_beside(wide_MN, table, MAP, part_rows, on_device, Widest(24, 17))
            assert found.data_ptr() == wide_MN.data_ptr()
        else:
            found = lora_add(y_MN, x_MK, table, MAP, part_rows, on_device, Widest(32, 24))
            assert found is y_MN
    assert relative_error(found, exact) < (1e-5 if dtype == torch.float32 else 1e-2)
    nobody = [row for row, slot in enumerate(slots) if slot == 0]
    assert torch.equal(found[nobody], untouched[nobody])


def test_a_part_without_an_adapter_counts_for_alignment():
    a_RK, b_NR = torch.zeros(8, 16), torch.zeros(16, 8)
    parts = [(None, 0.0), (b_NR, 1.0)]
    assert is_aligned(a_RK, parts, (16, 16))
    assert not is_aligned(a_RK, parts, (12, 16))  # the second part begins at column 12


@pytest.mark.parametrize("room", [0, 8])
def test_a_map_adds_what_the_slots_of_a_step_add(tmp_path, room, monkeypatch):
    """Through the engine's slots and a map, to its result, with requests of two adapters and of none.

    With room behind the weights, where no kernel shrinks x.
    """
    monkeypatch.setattr(adapter_slots, "MANY_ROWS", 1)
    if room:
        monkeypatch.setattr(lora, "shrink", None)
    base = tiny_checkpoints.folder("qwen3")
    model = open_checkpoint(base).load("cpu", torch.float32, fused=True)
    limits = Limits(rows=8, step_tokens=32, pages=8, page_size=8, context=64, vocabulary=300)
    slots, loaded = AdapterSlots(model, limits), {}
    slots.columns = AdapterColumns(model, room) if room else None
    for number, rank in ((1, 3), (2, 5)):
        tiny_adapters.write(base, AdapterSpec(rank=rank, alpha=8), tmp_path / str(number), number)
        loaded[number] = Adapters(model).read(str(tmp_path / str(number))).addends
        assert slots.put(number, loaded[number])
    request = lambda n: SimpleNamespace(adapter=n)  # noqa: E731
    chunks = [
        SimpleNamespace(request=request(n), count=c) for n, c in ((2, 3), (0, 2), (1, 1), (2, 1))
    ]
    slots.stage(chunks, tokens=9, most=8)  # two rows of padding
    assert slots.staged().positions == room
    numbers = [2, 2, 2, 0, 0, 1, 2, 0, 0]
    tensors = [
        p for adapter in loaded.values() for one in adapter.values() for p in one.parameters()
    ]
    there = {f"p{n}": tensor for n, tensor in enumerate(tensors)}
    inner = next(home for home in slots.maps if getattr(home, "parts", {}).keys() == {"gate", "up"})
    for home in (slots.maps[0], slots.maps[-1], inner):
        x_MK = torch.randn(9, home.shape_NK()[1])
        exact = home.product(x_MK).clone()
        for row, number in enumerate(numbers):
            if number:
                exact[row] += loaded[number][home].forward(x_MK[row : row + 1])[0]
        home.addend = slots.addends[home]
        with reachable(**there), torch.inference_mode():
            assert relative_error(home.product(x_MK), exact) < 1e-5
            if home is inner:
                gate = Gate("silu", gated=True)
                assert relative_error(home.product(x_MK, Epilogue(gate)), gate.plain(exact)) < 1e-5
        home.addend = None
    # Odd ranks are read otherwise, and the wider adapter changed what steps compute.
    assert slots.layouts == 1 + 2 * len(slots.maps)
    slots.drop(1)
    assert not slots.hold([1])
    assert slots.hold([2])
