"""The counts of a shape are those of the model that is built from it, here and in `transformers`."""

import math

import msgspec
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cairn.core.errors import ConfigError
from cairn.models.attend import Cached, KVCache, PackedDocuments, _visible
from cairn.models.build import ModelBuild
from cairn.models.cache import cache_bytes, cache_bytes_per_token
from cairn.models.export import to_hf
from cairn.models.presets import PRESETS, preset
from cairn.models.rope_scaling import stretched
from cairn.models.spec import Experts, ModelSpec, Rope, _pairs
from cairn.models.transformer import Transformer
from cairn.models.weights import random_model

# As the model cards and the index files of the checkpoints state them.
PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-235b-a22b": 235_093_634_560,
    "llama-3.1-405b": 405_853_388_800,
    "phi-4": 14_659_507_200,
    "smollm3-3b": 3_075_098_624,
    "olmo-3-7b": 7_298_011_136,
    "deepseek-v2-lite": 15_706_484_224,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
}
SIZES = dict(
    family="llama",
    vocab=50,
    hidden=24,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=20,
    context=64,
)


def with_changes(**changes) -> ModelSpec:
    return ModelSpec(**(SIZES | changes))


@st.composite
def shapes(draw) -> ModelSpec:
    """Any shape that can be built, whether or not a checkpoint format has a place for it."""
    kv_heads, layers, flag = draw(st.integers(1, 3)), draw(st.integers(1, 3)), st.booleans()
    count = draw(st.integers(1, 5))
    experts = Experts(
        count=count,
        per_token=draw(st.integers(1, count)),
        intermediate=draw(st.integers(1, 9)),
        gate=draw(st.sampled_from(["softmax", "sigmoid"])),
        renormalize=draw(flag),
        shared_intermediate=draw(st.sampled_from([0, 7])),
        dense_layers=tuple(draw(st.sets(st.integers(0, layers - 1)))),
    )
    return ModelSpec(
        family="any", vocab=draw(st.integers(1, 40)), hidden=draw(st.integers(1, 24)),
        layers=layers, heads=kv_heads * draw(st.integers(1, 3)), kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 5)), intermediate=draw(st.integers(1, 30)), context=32,
        tied=draw(flag), norm=draw(st.sampled_from(["rms", "layer"])), post_norms=draw(flag),
        qk_norm=draw(flag), qkv_bias=draw(flag), out_bias=draw(flag), mlp_bias=draw(flag),
        gated=draw(flag), positions=draw(st.sampled_from(["rope", "learned"])),
        windows=tuple(draw(st.lists(st.integers(0, 6), min_size=layers, max_size=layers))),
        attention_softcap=draw(st.sampled_from([0.0, 5.0])),
        experts=draw(st.sampled_from([None, experts])),
    )  # fmt: skip


# -- context ------------------------------------------------------------------------------------


def test_a_context_is_stretched_by_yarn_or_by_the_factors_of_the_model():
    llama = preset("tiny-llama")
    assert stretched(llama, 100).rope == llama.rope
    assert stretched(llama, 100).context == 100
    longer = stretched(llama, 4 * llama.context)
    assert longer.rope == Rope(kind="yarn", factor=4.0, original_context=llama.context)
    assert stretched(longer, 8 * llama.context).rope.factor == 8.0
    factors = dict(short_factors=(1.0,) * 8, long_factors=(2.0,) * 8)
    phi = msgspec.structs.replace(llama, rope=Rope(kind="longrope", original_context=64, **factors))
    assert stretched(phi, 64).context == 64  # where the short factors apply
    gpt2, llama3 = preset("tiny-gpt2"), preset("llama-3.2-1b")
    assert stretched(gpt2, 8).context == 8
    for spec, why in ((gpt2, "a table"), (llama3, "by llama3"), (phi, "for 256 tokens")):
        with pytest.raises(ConfigError, match=why):
            stretched(spec, 2 * spec.context)


# -- parameters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_the_same_model_in_transformers(name):
    spec = preset(name)
    config = transformers.AutoConfig.for_model(**to_hf(spec))
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(config)
    total = sum(p.numel() for p in reference.parameters())
    buffers = reference.named_buffers()  # among them a weight in all but name
    total += sum(b.numel() for name, b in buffers if name.endswith("e_score_correction_bias"))
    assert spec.parameters() == total


@pytest.mark.parametrize(("name", "total"), PUBLISHED.items())
def test_a_preset_has_the_published_number_of_parameters(name, total):
    assert preset(name).parameters() == total


@given(shapes())
def test_counted_parameters_are_those_of_the_built_model(spec):
    model = Transformer(spec, ModelBuild("meta"))
    assert spec.parameters() == sum(p.numel() for p in model.parameters())


@given(shapes())
def test_active_parameters_leave_out_the_experts_that_a_token_does_not_visit(spec):
    model = Transformer(spec, ModelBuild("meta"))
    idle = 0
    for name, parameter in model.named_parameters():
        if spec.experts and name.endswith(("inner_EFD", "down_EDF")):
            left_out = spec.experts.count - spec.experts.per_token
            idle += parameter.numel() // spec.experts.count * left_out
    assert spec.active_parameters() == spec.parameters() - idle


def test_three_billion_of_thirty_are_active():
    idle = 48 * (128 - 8) * 3 * 2048 * 768
    assert preset("qwen3-30b-a3b").active_parameters() == 30_532_122_624 - idle


def test_weight_bytes_follow_the_type():
    spec = preset("llama-3.1-8b")
    assert spec.weight_bytes() == 16_060_522_496
    assert spec.weight_bytes(bytes_per_value=0.5) == 4_015_130_624


# -- FLOPs --------------------------------------------------------------------------------------


def counted_flops(spec: ModelSpec, tokens: int, cached: int, logits: int) -> int:
    """What torch's own counter sees of a step of `tokens` behind `cached` ones."""
    model = random_model(spec, ModelBuild("cpu", torch.float32)).eval()
    cache = KVCache(spec, tokens + cached, torch.float32, "cpu")
    cache.length = cached  # nobody looks at the values
    cache.blocks_L2NKC.zero_()
    attend = Cached([cache], [tokens])
    counter = FlopCounterMode(display=False)
    # In its plain form attention is two products that the counter sees, over all keys, masked or not.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        ids_T = torch.arange(tokens) % spec.vocab
        hidden_TD = model(ids_T, attend.positions_T(), attend)
        if logits:
            model.logits(hidden_TD[-logits:])
    return counter.get_total_flops()


def whole_rectangle(spec: ModelSpec, tokens: int, cached: int) -> int:
    per_pair = sum(spec.mixer_shape(layer).pair_flops(spec) for layer in range(spec.layers))
    return per_pair * tokens * (tokens + cached)


@given(shapes(), st.integers(1, 12), st.integers(0, 12), st.data())
def test_forward_flops_are_those_that_torch_counts(spec, tokens, cached, data):
    logits = data.draw(st.integers(0, tokens))
    seen = counted_flops(spec, tokens, cached, logits)
    masked = whole_rectangle(spec, tokens, cached) - spec.attention_flops(tokens, cached)
    assert spec.forward_flops(tokens, cached, logits) == seen - masked


# A state's FLOPs are those of single tokens; several at once are other products.
@pytest.mark.parametrize(
    "name", [n for n in PRESETS if n.startswith("tiny") and not preset(n).is_recurrent]
)
def test_forward_flops_of_the_tiny_presets(name):
    spec = preset(name)
    seen = counted_flops(spec, 20, 0, 20)
    masked = whole_rectangle(spec, 20, 0) - spec.attention_flops(20)
    if (
        spec.experts and spec.experts.biases
    ):  # which are added as a product with weights of all experts
        masked += 2 * 20 * spec.experts.count * spec.hidden * spec.layers
    assert spec.forward_flops(20) == seen - masked


def test_training_costs_three_forward_passes():
    """Each product has two gradients of its own size; the first embedding has none."""
    spec = with_changes(layers=1)
    model = random_model(spec, ModelBuild("cpu", torch.float32))
    attend = PackedDocuments([16])
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        hidden_TD = model(torch.arange(16), attend.positions_T(), attend)
        model.logits(hidden_TD).sum().backward()
    masked = whole_rectangle(spec, 16, 0) - spec.attention_flops(16)
    assert spec.training_flops(16) == counter.get_total_flops() - 3 * masked


@given(tokens=st.integers(1, 40), cached=st.integers(0, 40), window=st.integers(0, 50))
def test_pairs_are_those_that_the_mask_leaves(tokens, cached, window):
    mask_SN = _visible(tokens, tokens + cached, window, torch.device("cpu"), None)
    by_hand = sum(
        1
        for query in range(cached, cached + tokens)
        for key in range(query + 1)
        if not window or query - key < window
    )
    assert _pairs(tokens, cached, window) == by_hand == mask_SN.sum()


@given(
    tokens=st.integers(1, 1000),
    cached=st.integers(0, 1000),
    windows=st.tuples(st.integers(0, 1500), st.integers(0, 1500)),
)
def test_attention_flops_add_up_over_tokens_and_layers(tokens, cached, windows):
    """A step of many tokens costs what as many steps of one token cost."""
    spec = with_changes(windows=windows)
    seen = sum(
        min(position + 1, window or position + 1)
        for position in range(cached, cached + tokens)
        for window in windows
    )
    assert spec.attention_flops(tokens, cached) == 4 * spec.heads * spec.head_dim * seen


# -- the cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-moe", "tiny-gpt2"])
def test_kv_bytes_are_those_of_the_cache(name):
    spec = preset(name)
    cache = KVCache(spec, 37, torch.bfloat16, "cpu")
    assert cache_bytes(spec, 37) == cache_bytes_per_token(spec) * 37 == cache.blocks_L2NKC.nbytes
    assert cache_bytes(spec, 37, value_bytes=4) == 2 * cache.blocks_L2NKC.nbytes


def test_a_windowed_layer_keeps_its_window():
    spec = with_changes(windows=(10, 0))
    per_layer = 2 * spec.kv_heads * spec.head_dim * 2
    assert cache_bytes(spec, 7) == (7 + 7) * per_layer
    assert cache_bytes(spec, 50) == (10 + 50) * per_layer


# -- what cannot be built -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *[
            ({field: 0}, f"{field} is 0 in a llama model")
            for field in (
                "vocab",
                "hidden",
                "layers",
                "heads",
                "kv_heads",
                "head_dim",
                "intermediate",
                "context",
            )
        ],
        ({"layers": -3}, "layers is -3 in a llama model"),
        ({"heads": 5}, "5 attention heads cannot share 2 key/value heads evenly"),
        ({"head_dim": 7}, "rotary positions need an even head size, not 7"),
        ({"windows": (4,)}, "1 windows for 2 layers"),
        ({"windows": (4, -1)}, "window -1"),
        ({"rope": Rope(theta=0.0)}, "theta 0.0 and factor 1.0"),
        ({"rope_local": Rope(kind="linear", factor=-2.0)}, "theta 10000.0 and factor -2.0"),
        ({"rope": Rope(theta=math.nan)}, "theta nan and factor 1.0"),
        ({"experts": Experts(count=4, per_token=2, intermediate=0)}, "width of an expert is 0"),
        ({"experts": Experts(count=4, per_token=5, intermediate=8)}, "5 of 4 experts per token"),
        ({"experts": Experts(count=4, per_token=0, intermediate=8)}, "0 of 4 experts per token"),
    ],
    ids=str,
)
def test_a_shape_that_cannot_be_built_is_refused_with_its_values(changes, message):
    with pytest.raises(ConfigError) as caught:
        with_changes(**changes)
    assert message in caught.value.message
    assert caught.value.hint


def test_an_odd_head_size_is_fine_where_nothing_is_rotated():
    assert with_changes(head_dim=7, positions="learned").head_dim == 7


@pytest.mark.parametrize(
    ("name", "hint"),
    [("qwen3-0.6", "did you mean 'qwen3-0.6b'?"), ("zebra", "one of: qwen3-0.6b, ")],
)
def test_an_unknown_preset_is_refused_with_a_suggestion(name, hint):
    with pytest.raises(ConfigError, match=f"no model shape is called {name!r}") as caught:
        preset(name)
    assert caught.value.hint.startswith(hint)


def test_a_preset_s_name_may_be_in_capitals():
    assert preset("Qwen3-0.6B") == preset("qwen3-0.6b")
