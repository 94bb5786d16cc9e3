"""Steps by compiled kernels: attention against float64, and a whole step against the form that Python drives."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from noisy_drafter import NoisyDrafter

from cairn.kernels.cpu import compiled
from cairn.kernels.cpu.packed_product import NormWeight
from cairn.kernels.cpu.paged_decode import DecodeHeads, Sequences
from cairn.models.attend import AttentionRule, attention
from cairn.models.build import ModelBuild
from cairn.models.cache import cache_groups
from cairn.models.lean import Lean
from cairn.models.linear.blocks import RoundedRows
from cairn.models.linear.maps import ColumnParallelLinear, RowParallelLinear
from cairn.models.presets import preset
from cairn.models.runnable import OpenModel, Runnable
from cairn.models.spec import ModelSpec, Rope
from cairn.models.transformer import Transformer
from cairn.models.weights import random_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.compiled_layers import CompiledLayers, obstacle
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.pages import Paged, PagePool
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start_with
from cairn.serve.separation.decode import DecodeSide
from cairn.serve.separation.pair import Separated
from cairn.serve.separation.prefill import Ask, PrefillSide
from cairn.serve.separation.timed_answers import generate_alone

pytestmark = pytest.mark.skipif(compiled.obstacle() is not None, reason=str(compiled.obstacle()))
PAGE = 4
QWEN = msgspec.structs.replace(
    preset("tiny-qwen3"), hidden=64, heads=4, kv_heads=2, head_dim=32, intermediate=96, layers=3
)
GEMMA = msgspec.structs.replace(
    *(QWEN,),
    post_norms=True,
    activation="gelu_tanh",
    windows=(3, 0, 3),
    rope_local=Rope(theta=100.0),
)


@settings(max_examples=60, deadline=None)
@given(
    groups=st.sampled_from([(1, 1), (2, 1), (6, 3), (8, 2), (5, 1), (70, 1)]),
    size=st.sampled_from([8, 24, 64, 80]),
    window=st.sampled_from([0, 1, 5, 40]),
    lengths=st.lists(st.tuples(st.integers(1, 90), st.integers(1, 19)), min_size=1, max_size=4),
    parts=st.tuples(st.booleans(), st.booleans()),
)
def test_attention_over_pages_is_that_of_float64(groups, size, window, lengths, parts):
    """Of sequences with some tokens each; and each token has the bits that it has alone."""
    (heads, kv_heads), (normed, rotated), count = groups, parts, len(lengths)
    lengths, tokens = [n for n, _ in lengths], [min(n, t) for n, t in lengths]
    total, chance = sum(tokens), torch.Generator().manual_seed(sum(lengths) + size)
    pages = -(-max(lengths) // PAGE)
    tables = (1 + torch.randperm(count * pages, generator=chance)).view(count, pages).int()
    cache = torch.randn(2, (1 + count * pages) * PAGE, kv_heads, size, generator=chance)
    qkv = torch.randn(total, heads + 2 * kv_heads, size, generator=chance)
    weight = torch.rand(heads + kv_heads, size, generator=chance) if normed else None
    angle = torch.rand(total, 1, size, generator=chance) * 6 if rotated else None
    rule = AttentionRule(0, 0.3, window)
    before, one_by_one = cache.double(), cache.clone()
    slots = [
        tables[i, (at := torch.arange(n)) // PAGE].long() * PAGE + at % PAGE
        for i, n in enumerate(lengths)
    ]
    new = torch.cat([slot[-t:] for slot, t in zip(slots, tokens, strict=True)])
    bounds = torch.tensor([0, *tokens]).cumsum(0)

    made = DecodeHeads(heads, kv_heads, size, rule.scale, window, weight, 1e-6)
    angles = None if angle is None else signed(angle)
    sequences = Sequences(new[None], torch.tensor(lengths), tables[None], PAGE, bounds)
    found = made.attend(qkv.flatten(1), angles, sequences, 0, addresses(cache))

    q, k = placed(qkv[:, :-kv_heads].double(), weight, angle).split((heads, kv_heads), 1)
    before[0, new], before[1, new] = k, qkv[:, -kv_heads:].double()
    each = zip(q.split(tokens), slots, strict=True)
    expected = torch.cat([attention(one, before[0, at], before[1, at], rule) for one, at in each])
    torch.testing.assert_close(found.double(), expected.flatten(1), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(cache.double(), before, rtol=1e-5, atol=1e-5)

    for at in range(max(tokens)):  # the first tokens of all sequences, the second ones, ..
        who = [i for i, t in enumerate(tokens) if at < t]
        rows = bounds[who] + at
        seen = torch.tensor([lengths[i] - tokens[i] + at + 1 for i in who])
        alone = Sequences(new[None, rows], seen, tables[None, who], PAGE)
        own = None if angles is None else tuple(part[rows] for part in angles)
        row = made.attend(qkv[rows].flatten(1), own, alone, 0, addresses(one_by_one))
        assert torch.equal(row, found[rows])
    assert torch.equal(one_by_one, cache)


def addresses(cache: torch.Tensor) -> tuple[int, int]:
    return cache[0].data_ptr(), cache[1].data_ptr()


def signed(angle: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = angle.sin().chunk(2, -1)
    return angle.cos(), torch.cat((-low, high), -1)


def placed(
    qk: torch.Tensor, weight: torch.Tensor | None, angle: torch.Tensor | None
) -> torch.Tensor:
    """Queries and keys, normed and rotated one operation after another."""
    if weight is not None:
        qk = torch.nn.functional.rms_norm(qk, qk.shape[-1:], None, 1e-6) * weight
    if angle is None:
        return qk
    low, high = qk.chunk(2, -1)
    return qk * angle.double().cos() + torch.cat((-high, low), -1) * angle.double().sin()


def packed_model(spec: ModelSpec) -> Transformer:
    """Every map of its layers in 8-bit rows."""
    model = random_model(spec, ModelBuild("cpu"), seed=3).requires_grad_(False)
    for part in model.layers.modules():
        if isinstance(part, ColumnParallelLinear | RowParallelLinear):
            part.take(RoundedRows(part.joined(), [len(weight) for weight in part.matrices()]))
    return model


@pytest.mark.parametrize("tokens", [(1, 1, 1), (4, 1, 6)], ids=["one each", "some each"])
@pytest.mark.parametrize("spec", [QWEN, GEMMA], ids=["qwen3", "gemma3"])
@torch.inference_mode()
def test_a_compiled_step_has_the_bits_of_the_lean_form(spec, tokens):
    model = packed_model(spec)
    lean, lengths = Lean(model), [9, 1, 6]
    groups = cache_groups(spec)
    pools = [PagePool(groups, 40, PAGE, torch.float32, "cpu") for _ in range(3)]
    chance = torch.Generator().manual_seed(1)
    for pool in pools:
        pool.cache.copy_(torch.randn(pool.cache.shape, generator=chance.manual_seed(1)))
    assert obstacle(lean, pools[1]) is None
    tables = 1 + torch.randperm(36, generator=chance)[: len(groups) * 9].view(len(groups), 3, 3)
    spans = [torch.arange(n - t, n) for n, t in zip(lengths, tokens, strict=True)]
    positions = torch.cat(spans).int()
    owner = torch.arange(3).repeat_interleave(torch.tensor(tokens))
    page = tables[:, owner, positions.long() // PAGE]
    slots = (page * PAGE + positions % PAGE).int()
    bounds = None if max(tokens) == 1 else torch.tensor([0, *tokens]).cumsum(0).int()
    own = (slots, positions, torch.tensor(lengths).int(), tables.int(), bounds)
    steps = [Paged(pool, *own) for pool in pools]
    ids = torch.arange(len(positions)).int() + 3
    expected, tapped = lean.tapped(ids, positions, steps[0], (0, 2))
    hidden, found = CompiledLayers(lean, pools[1]).tapped(ids, positions, steps[1], (0, 2))
    assert torch.equal(hidden, expected)
    assert all(map(torch.equal, found, tapped))
    assert torch.equal(pools[0].cache, pools[1].cache)
    plain = model(ids, positions, steps[2])
    torch.testing.assert_close(expected, plain, rtol=1e-3, atol=1e-3)


def compiled_engine(spec: ModelSpec, drafter: NoisyDrafter | None = None) -> Engine:
    """Its steps are compiled, and prompts come in chunks beside requests that decode."""
    model, drafts = packed_model(spec), 0 if drafter is None else 5
    config = EngineConfig(
        model="packed",
        device="cpu",
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=200,
        weights="packed",
    )
    opened = OpenModel("packed", spec, None, (), None)
    runnable = Runnable("packed", model, "a test")
    engine = start_with(opened, runnable, config, drafter=drafter, drafts=drafts).engine
    assert isinstance(engine.runner.lean, CompiledLayers)
    return engine


def answers(spec: ModelSpec, drafter: NoisyDrafter | None) -> list[list[int]]:
    engine = compiled_engine(spec, drafter)
    kinds = [
        {"temperature": 0},
        {"temperature": 1.1, "seed": 4},
        {"temperature": 0.9, "top_k": 9, "seed": 5},
    ]
    requests = [
        Request(i, list(range(3, 10 + 19 * i)), SamplingParams(max_tokens=24, **kinds[i % 3]))
        for i in range(4)
    ]
    for request in requests:
        engine.add(request)
    engine.run()
    return [request.outputs for request in requests]


@pytest.mark.skipif(not compiled.ON_ARM, reason="rows may round otherwise together than alone")
@pytest.mark.parametrize("spec", [QWEN, GEMMA], ids=["qwen3", "gemma3"])
def test_compiled_steps_that_verify_drafts_answer_as_without(spec):
    wanted = answers(spec, None)
    for accuracy in (0.5, 1.0):
        told = dict(enumerate(wanted))
        assert answers(spec, NoisyDrafter(told, accuracy, spec.vocab)) == wanted


@pytest.mark.parametrize("spec", [QWEN, GEMMA], ids=["qwen3", "gemma3"])
def test_pages_that_move_to_where_another_engine_reads_them_are_those_of_compiled_steps(spec):
    """A hand-over takes the pool into memory of its transport: steps write there, and read what arrives there."""
    params = SamplingParams(temperature=0, max_tokens=12)
    asks = [Ask(id=str(i), prompt=list(range(3, 40 + i)), params=params) for i in range(2)]
    alone = [one.tokens for one in generate_alone(compiled_engine(spec), asks)]
    engines = [compiled_engine(spec) for _ in range(2)]
    for engine in engines:  # it has served before its role changes
        engine.add(Request("first", [5, 6, 7], params))
        engine.run()
        engine.reset_prefix_cache()
    sides = PrefillSide(engines[0], transport="shm"), DecodeSide(engines[1], transport="shm")
    with Separated(*sides) as pair:
        found = pair.generate(asks)
        assert [one.tokens for one in found] == alone
        assert [one.arrival.why_not for one in found] == [None, None]
        assert all(isinstance(engine.runner.lean, CompiledLayers) for engine in engines)


@torch.inference_mode()
def test_a_model_with_a_map_in_floating_point_is_not_compiled_as_a_whole():
    model = packed_model(QWEN)
    model.layers[1].feed_forward.down.take(None)
    pool = PagePool(cache_groups(QWEN), 8, PAGE, torch.float32, "cpu")
    assert "layer 1: not all of its maps" in (obstacle(Lean(model), pool) or "")


def test_a_norm_behind_a_block_is_added_as_by_torch():
    y, onto, weight = torch.randn(5, 96), torch.randn(5, 96), torch.rand(96)
    expected = onto + torch.nn.functional.rms_norm(y, (96,), weight, 1e-6)
    NormWeight(weight, 1e-6).add_normed(y, onto)
    torch.testing.assert_close(onto, expected)
