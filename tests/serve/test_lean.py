"""The lean form computes what the plain form does, over the same pages, for every family that has one."""

import pytest
import tiny_checkpoints
import torch

from cairn.models.cache import cache_groups
from cairn.models.checkpoint import open_checkpoint
from cairn.models.lean import Lean, obstacle
from cairn.models.transformer import Transformer
from cairn.serve.engine.pages import Paged, PagePool

PAGE, PAGES = 16, 12
LENGTHS = (21, 1, 37)  # tokens of the three prompts


def tiny(family: str) -> Transformer:
    return open_checkpoint(tiny_checkpoints.folder(family)).load("cpu", torch.float32)


def pages(model: Transformer) -> PagePool:
    return PagePool(cache_groups(model.spec, grouped=False), PAGES, PAGE, torch.float32, "cpu")


def step(
    pool: PagePool, counts: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[torch.Tensor, Paged]:
    """Positions of a step, and its attend; sequence i has pages 1 + 3 * i and the two behind."""
    tables = torch.tensor(
        [[1 + 3 * i, 2 + 3 * i, 3 + 3 * i] for i in range(len(counts))], dtype=torch.int32
    )
    places = [
        torch.arange(length - count, length) for count, length in zip(counts, lengths, strict=True)
    ]
    slots = torch.cat(
        [tables[i, place // PAGE].long() * PAGE + place % PAGE for i, place in enumerate(places)]
    )
    bounds = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    one_each = max(counts) == 1
    positions = torch.cat(places).int()
    return positions, Paged(
        pool,
        slots.int()[None],
        positions,
        torch.tensor(lengths, dtype=torch.int32),
        tables[None],
        None if one_each else bounds,
    )


@pytest.mark.parametrize("family", tiny_checkpoints.FAMILY_NAMES)
def test_both_forms_compute_the_same(family):
    model = tiny(family)
    if why := obstacle(model):
        pytest.skip(f"{family} has no lean form: {why}")
    plain_pool, lean_pool = pages(model), pages(model)
    lean = Lean(model)
    later = tuple(length + 1 for length in LENGTHS)
    with torch.inference_mode():
        for counts, lengths in (
            (LENGTHS, LENGTHS),
            ((1, 1, 1), later),
        ):  # prompts, then a token of each
            positions, attend = step(plain_pool, counts, lengths)
            tokens = (positions * 7 + 3) % model.spec.vocab
            expected = model(tokens, positions, attend)
            found = lean(tokens, *step(lean_pool, counts, lengths))
            assert torch.allclose(
                found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())
            )
        assert torch.allclose(lean_pool.cache, plain_pool.cache, rtol=1e-4, atol=1e-4)


def test_a_model_in_another_type_has_no_lean_form():
    model = open_checkpoint(tiny_checkpoints.folder("qwen3")).load("cpu", torch.bfloat16)
    assert "float32" in (obstacle(model) or "")
