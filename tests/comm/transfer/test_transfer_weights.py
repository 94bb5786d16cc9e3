"""The same planner for weights and checkpoints: FSDP, ZeRO, tensor and pipeline parallel into each other."""

import json
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from cairn.comm.transfer.copies import copy_one_by_one
from cairn.comm.transfer.kv import KVContents, KVLayout, plan_kv
from cairn.comm.transfer.plan import make_plan
from cairn.comm.transfer.shard import Box, flat_boxes
from cairn.comm.transfer.weights import (
    HeldTensor,
    PackedWeightShards,
    cut_of,
    pack,
    rows_of,
    share_of,
    stored,
)
from cairn.core.errors import ConfigError
from cairn.models.build import ModelBuild
from cairn.models.cache import cache_groups
from cairn.models.spec import ModelSpec
from cairn.models.transformer import Transformer
from cairn.serve.engine.pages import PagePool

SPEC = ModelSpec(
    family="qwen3", vocab=96, hidden=32, layers=3, heads=8, kv_heads=4, head_dim=8, intermediate=48, context=64,
)  # fmt: skip


class Share:
    """A tensor parallel place, for building a model's slots."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def tensors_of_a_model() -> dict[str, np.ndarray]:
    slots = Transformer(SPEC, ModelBuild("meta")).slots()
    rng = np.random.default_rng(3)
    return {slot.name: rng.integers(0, 1 << 16, slot.shape, dtype=np.uint16) for slot in slots}


def of_rank(rank: int, boxes: dict[str, list[Box]]) -> PackedWeightShards:
    return pack(rank, (HeldTensor(name, 2, box) for name, cuts in boxes.items() for box in cuts))


def memory_of(held: PackedWeightShards, whole: dict[str, np.ndarray]) -> np.ndarray:
    """The rank's bytes, by numpy's own slicing."""
    memory = np.zeros(held.nbytes, np.uint8)
    for shard in held.shards:
        part = whole[shard.tensor][tuple(slice(*ends) for ends in shard.box)]
        memory[shard.base : shard.base + shard.nbytes] = (
            np.ascontiguousarray(part).view(np.uint8).ravel()
        )
    return memory


def layouts(whole: dict[str, np.ndarray], ranks: int, kind: str) -> list[PackedWeightShards]:
    shapes = {name: tensor.shape for name, tensor in whole.items()}
    if kind == "fsdp":
        return [
            of_rank(rank, {name: [rows_of(shape, rank, ranks)] for name, shape in shapes.items()})
            for rank in range(ranks)
        ]
    if kind == "zero":
        return [
            of_rank(
                rank,
                {
                    name: flat_boxes(shape, *_stretch(math.prod(shape), rank, ranks))
                    for name, shape in shapes.items()
                },
            )
            for rank in range(ranks)
        ]
    if kind == "replicas":
        return [
            of_rank(rank, {name: [cut_of(s, None)] for name, s in shapes.items()})
            for rank in range(ranks)
        ]
    return [
        pack(
            rank,
            (
                HeldTensor(slot.name, 2, cut_of(slot.shape, slot.cut))
                for slot in slots_of(rank, ranks)
            ),
        )
        for rank in range(ranks)
    ]


def slots_of(rank: int, ranks: int):
    return list(Transformer(SPEC, ModelBuild("meta", shards=Share(rank, ranks))).slots())


def _stretch(elements: int, rank: int, ranks: int) -> tuple[int, int]:
    return elements * rank // ranks, elements * (rank + 1) // ranks


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("fsdp", 4), ("tensor", 2)),  # a trainer to a server
        (("fsdp", 3), ("tensor", 4)),
        (("zero", 5), ("tensor", 2)),
        (("tensor", 4), ("fsdp", 2)),
        (("tensor", 2), ("tensor", 4)),
        (("replicas", 4), ("tensor", 2)),
        (("fsdp", 2), ("replicas", 3)),
    ],
)
def test_weights_of_a_model_change_their_layout(source, target):
    whole = tensors_of_a_model()
    held, wanted = layouts(whole, source[1], source[0]), layouts(whole, target[1], target[0])
    memories = [memory_of(one, whole) for one in held]
    got = [np.zeros(one.nbytes, np.uint8) for one in wanted]
    plan = make_plan(
        [s for one in held for s in one.shards], [s for one in wanted for s in one.shards]
    )
    for leg in plan.legs:
        copy_one_by_one(memories[leg.source_rank], got[leg.target_rank], leg.runs)
    for memory, one in zip(got, wanted, strict=True):
        assert np.array_equal(memory, memory_of(one, whole))
    sent = plan.sent()
    if (
        source[0] == "replicas"
    ):  # everybody holds everything: nobody may do much more than a fair share
        assert max(sent.values()) <= plan.nbytes / source[1] + 2 * SPEC.vocab * SPEC.hidden / 4


def test_a_safetensors_file_is_a_rank_that_holds_everything(tmp_path):
    """Checkpoint resharding: ranges to read from the file, for each rank of another layout."""
    whole = tensors_of_a_model()
    path = tmp_path / "model.safetensors"
    save_file(whole, path)
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = {
        name: entry
        for name, entry in json.loads(raw[8 : 8 + length]).items()
        if name != "__metadata__"
    }
    held = [
        stored(name, entry["shape"], 2, 0, "file", 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
    ]
    wanted = layouts(whole, 2, "tensor")
    got = [np.zeros(one.nbytes, np.uint8) for one in wanted]
    for leg in make_plan(held, [s for one in wanted for s in one.shards]).legs:
        copy_one_by_one(np.frombuffer(raw, np.uint8), got[leg.target_rank], leg.runs)
    for memory, one in zip(got, wanted, strict=True):
        assert np.array_equal(memory, memory_of(one, whole))


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    ends=st.tuples(st.integers(0, 700), st.integers(0, 700)),
)
def test_a_stretch_of_elements_as_rectangles(shape, ends):
    start, stop = sorted(ends)
    marks = np.zeros(shape, int)
    boxes = flat_boxes(shape, start, stop)
    for box in boxes:
        marks[tuple(slice(*one) for one in box)] += 1
    expected = np.zeros(math.prod(shape), int)
    expected[start:stop] = 1
    assert np.array_equal(marks.ravel(), expected)
    assert len(boxes) <= 2 * len(shape) - 1


def test_an_uneven_cut_is_refused():
    with pytest.raises(ConfigError, match="tensor parallel 4 does not divide axis 0"):
        share_of((6, 2), 0, 0, 4)


@pytest.mark.parametrize("heads_first", [False, True])
def test_the_engines_own_pool_is_one_of_the_layouts(heads_first):
    """Bytes planned from the engine's pool arrive where the engine's own views look for them."""
    contents = KVContents(
        model="m", layers=SPEC.layers, kv_heads=SPEC.kv_heads, width=SPEC.head_dim, dtype="float32"
    )
    source = KVLayout(contents=contents, page_size=4, pages=9)
    target = KVLayout(contents=contents, page_size=8, pages=5, heads_first=heads_first)
    ours, theirs = (pool_of(layout) for layout in (source, target))
    ours.cache.copy_(torch.randn_like(ours.cache))
    plan = plan_kv(source, [7, 2, 5, 8], target, [4, 1], (0, 14))
    memories = [pool.cache.numpy().view(np.uint8).reshape(-1) for pool in (ours, theirs)]
    for leg in plan.legs:
        copy_one_by_one(*memories, leg.runs)
    for layer in range(SPEC.layers):
        for here, there in zip(ours.of_layer(layer), theirs.of_layer(layer), strict=True):
            tokens = [
                side.reshape(-1, *side.shape[2:]) for side in (here[[7, 2, 5, 8]], there[[4, 1]])
            ]
            assert torch.equal(tokens[0][:14], tokens[1][:14])


def pool_of(layout: KVLayout) -> PagePool:
    pool = PagePool(cache_groups(SPEC), layout.pages, layout.page_size, torch.float32, "cpu")
    if layout.heads_first:  # as on a GPU
        pool.heads_first = True
        pool.cache = pool.cache.transpose(3, 4).contiguous()
    return pool
