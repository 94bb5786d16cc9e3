"""A config.json is read as `transformers` reads it, or refused by the name of what is not understood."""

import copy
import json
import math

import pytest
import tiny_checkpoints
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from published_configs import CONFIGS as PUBLISHED

from cairn.core.errors import CairnError, UnsupportedModel
from cairn.models.config_fields import LAYER_COUNTS
from cairn.models.expert_families import EXPERT_FAMILIES
from cairn.models.export import to_hf
from cairn.models.families import FAMILIES, from_hf
from cairn.models.llama_like_families import DESCRIBED
from cairn.models.presets import PRESETS, preset
from cairn.models.recurrent_families import RECURRENT
from cairn.models.rope import frequencies
from cairn.models.sparse_families import SPARSE
from cairn.models.spec import Experts, ModelSpec, Rope

# What a config has to say; the rest has a default.
SIZES = dict(
    vocab_size=99,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=5,
    eos_token_id=6,
)
MINIMAL = {
    **{kind: SIZES for kind in FAMILIES if kind != "gpt2"},
    "qwen3_moe": SIZES | {"moe_intermediate_size": 12},
    "granitemoehybrid": SIZES
    | {"layer_types": ["full_attention"] * 8, "num_local_experts": 0, "mamba_n_heads": 1},
    "deepseek_v2": SIZES | {"num_experts_per_tok": 2},
    "gpt2": dict(vocab_size=99, n_embd=32, n_layer=2, n_head=4, bos_token_id=5, eos_token_id=6),
}
GRANITE4 = {"layer_types", "num_local_experts", "mamba_n_heads"}  # they make it a dense model
SIZED = {kind: fields.keys() - GRANITE4 for kind, fields in MINIMAL.items()}
families = pytest.mark.parametrize("kind", FAMILIES)
UNKNOWN_TO_TRANSFORMERS = {"mimo": "qwen2"}  # and which family its config and its spec are of
# Fields that most families refuse, and these read.
UNDERSTOOD = {
    **{
        kind: ["partial_rotary_factor"]
        for kind in (
            "phi3",
            "glm4",
            "glm4_moe",
            "minimax_m2",
            "qwen3_next",
            "qwen3_5_text",
            "qwen3_5_moe_text",
        )
    },
    "smollm3": ["pretraining_tp"],
}


def minimal(kind: str, **changes) -> dict:
    return {"model_type": kind, **MINIMAL[kind], **changes}


def as_transformers_reads_it(config: dict) -> dict:
    kind = UNKNOWN_TO_TRANSFORMERS.get(config["model_type"], config["model_type"])
    return transformers.AutoConfig.for_model(
        **copy.deepcopy(config) | {"model_type": kind}
    ).to_dict()


def refusal(config: dict) -> CairnError:
    with pytest.raises(UnsupportedModel) as caught:
        from_hf(config)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


# -- fields -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tiny_checkpoints.FAMILY_NAMES)
def test_the_fields_of_a_config_arrive_in_the_spec(name):
    config = tiny_checkpoints.CONFIGS[name]()
    spec = from_hf(config.to_dict())
    assert spec.vocab == config.vocab_size
    assert spec.hidden == config.hidden_size
    assert spec.layers == config.num_hidden_layers
    assert spec.heads == config.num_attention_heads
    assert spec.kv_heads == getattr(config, "num_key_value_heads", spec.heads)
    assert spec.head_dim == getattr(config, "head_dim", spec.hidden // spec.heads)
    assert spec.norm_eps == 1e-5
    assert spec.tied == config.tie_word_embeddings
    assert (spec.bos_id, spec.eos_ids) == (1, (2,))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-biases", {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "tied": True}),
        ("llama-one-kv-head", {"head_dim": 8, "kv_heads": 1}),
        ("llama-linear", {"rope": Rope(kind="linear", factor=4.0)}),
        (
            "llama-dynamic",
            {"rope": Rope(kind="dynamic", factor=4.0, original_context=24), "context": 96},
        ),
        (
            "llama3",
            {"rope": Rope(theta=5e5, kind="llama3", factor=8.0, original_context=20)},
        ),
        ("mistral", {"windows": (12, 12, 12)}),
        ("mistral-full", {"windows": ()}),
        ("qwen2", {"qkv_bias": True, "out_bias": False, "windows": ()}),
        ("qwen2-window", {"windows": (0, 9, 9)}),
        ("qwen3", {"qk_norm": True, "qkv_bias": False, "tied": True}),
        (
            "qwen3-yarn",
            {"rope": Rope(theta=1e6, kind="yarn", factor=4.0, original_context=40)},
        ),
        (
            "qwen3_moe",
            {"experts": Experts(count=6, per_token=2, intermediate=24, dense_layers=(1,))},
        ),
        (
            "qwen3_moe-plain-topk",
            {
                "experts": Experts(
                    count=5, per_token=3, intermediate=24, renormalize=False, dense_layers=(0, 2)
                )
            },
        ),
        ("mixtral", {"experts": Experts(count=5, per_token=2, intermediate=80)}),
        (
            "gpt2",
            {"positions": "learned", "norm": "layer", "gated": False, "activation": "gelu_tanh",
             "intermediate": 192, "tied": True, "context": 160},
        ),
        (
            "gemma2",
            {"windows": (10, 0, 10, 0), "attention_softcap": 3.0, "logit_softcap": 2.0,
             "query_scale": 24**-0.5, "norm_plus_one": True, "post_norms": True},
        ),
        (
            "gemma3",
            {"windows": (8, 8, 8, 8, 8, 0, 8), "rope_local": Rope(), "qk_norm": True,
             "rope": Rope(theta=1e6, kind="linear", factor=8.0), "embedding_scale": 48**0.5},
        ),
    ],
)  # fmt: skip
def test_what_makes_a_family_special(name, expected):
    spec = from_hf(tiny_checkpoints.CONFIGS[name]().to_dict())
    assert {field: getattr(spec, field) for field in expected} == expected


@families
def test_defaults_are_those_of_transformers(kind):
    assert from_hf(minimal(kind)) == from_hf(as_transformers_reads_it(minimal(kind)))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("mistral", {"sliding_window": None}),
        ("mixtral", {"sliding_window": 7}),
        ("mixtral", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 9}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 5}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "num_hidden_layers": 30}),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}),
        ("qwen3_moe", {"use_sliding_window": True}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 5}),
        ("qwen3_moe", {"decoder_sparse_step": 3, "mlp_only_layers": [2, 4]}),
        ("qwen3_moe", {"num_local_experts": 16}),
        ("llama", {"num_key_value_heads": None}),
        (
            "llama",
            {
                "rope_parameters": {"rope_theta": 5.0},
                "rope_theta": 7.0,
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
        ),
        ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("gemma3_text", {"sliding_window_pattern": 3, "rope_local_base_freq": 500.0}),
        ("gemma3_text", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8}}),
        ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}),
        ("gemma3_text", {"final_logit_softcapping": 4.0}),
        ("gpt_oss", {"rope_theta": 5e5, "rope_scaling": None}),
        ("seed_oss", {"head_dim": None}),
        ("qwen3", {"hidden_size": 33}),  # whose heads do not depend on it
        (
            "ministral3",
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
            },
        ),
        ("gpt2", {"n_inner": 50, "activation_function": "relu", "tie_word_embeddings": False}),
    ],
    ids=str,
)
def test_the_same_fields_mean_the_same_to_transformers(kind, fields):
    config = minimal(kind, **fields)
    assert from_hf(config) == from_hf(as_transformers_reads_it(config))


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 4.0, "type": "linear"},
        {"factor": 4.0, "rope_type": "dynamic"},
        {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "rope_type": "llama3",
         "original_max_position_embeddings": 32},
        {"factor": 4.0, "rope_type": "yarn", "original_max_position_embeddings": 16},
        {"factor": 4.0, "rope_type": "yarn", "original_max_position_embeddings": 16,
         "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 20, "beta_slow": 2, "truncate": False},
    ],
    ids=lambda scaling: scaling.get("rope_type", "linear"),
)  # fmt: skip
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral"])
def test_old_and_new_spelling_of_rotary_positions_mean_the_same(kind, scaling):
    new = {"rope_parameters": {**scaling, "rope_theta": 7e4}, "dtype": "bfloat16", "head_dim": 8}
    old = {"rope_scaling": scaling, "rope_theta": 70000, "torch_dtype": "bfloat16", "head_dim": 8}
    spec = from_hf(minimal(kind, **old))
    assert spec.rope.theta == 7e4
    assert spec == from_hf(minimal(kind, **new))
    assert spec == from_hf(as_transformers_reads_it(minimal(kind, **old)))
    reference = transformers.AutoConfig.for_model(**minimal(kind, **copy.deepcopy(old)))
    name = scaling.get("rope_type", scaling.get("type"))
    angles, amplitude = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[name](reference, "cpu")
    ours, our_amplitude = frequencies(
        spec.rope, spec, torch.device("cpu"), torch.tensor([spec.rope.original_context])
    )
    assert our_amplitude == pytest.approx(amplitude)
    torch.testing.assert_close(ours.reshape(-1), angles)


# -- published ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read_as_transformers_reads_it(name):
    spec = from_hf(PUBLISHED[name])
    reread = as_transformers_reads_it(PUBLISHED[name])
    assert spec == from_hf(reread)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Qwen/Qwen3-0.6B", "qwen3-0.6b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("meta-llama/Llama-3.2-1B-Instruct", "llama-3.2-1b"),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("openai-community/gpt2", "gpt2"),
    ],
)
def test_a_preset_is_the_published_config(name, shape):
    assert from_hf(PUBLISHED[name]) == preset(shape)


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134_515_008),
        ("google/gemma-2-2b", 2_614_341_888),
        ("google/gemma-3-1b-it", 999_885_952),
    ],
)
def test_a_published_config_has_the_published_number_of_parameters(name, total):
    assert from_hf(PUBLISHED[name]).parameters() == total


# -- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["phi", "gemma3", None, 7, ["llama"], ""])
def test_an_unknown_architecture_is_named(kind):
    error = refusal({"model_type": kind, "architectures": ["OddForCausalLM"]})
    assert f"model_type {kind!r}" in error.message
    assert "OddForCausalLM" in error.message
    assert "gemma2, gemma3_text, glm4" in error.hint


def test_a_config_without_a_model_type_is_refused():
    assert "model_type None" in refusal({}).message


def test_the_multimodal_gemma_points_to_the_text_model():
    error = refusal({"model_type": "gemma3", "text_config": minimal("gemma3_text")})
    assert "gemma3_text" in error.hint


@families
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_chunk_size", 8192),
        ("partial_rotary_factor", 0.5),
        ("add_cross_attention", True),
        ("pretraining_tp", 2),
    ],
)
def test_a_field_that_nobody_reads_is_refused_by_name(kind, field, value):
    if field in UNDERSTOOD.get(kind, []):
        pytest.skip("a field of this family")
    error = refusal(minimal(kind, **{field: value}))
    assert error.message == f"config.json: field {field!r} (value {value!r}) is not supported"


@pytest.mark.parametrize("name", tiny_checkpoints.CONFIGS)
def test_an_absurd_number_of_layers_is_refused_by_name(name):
    """Before anything as long as that is made."""
    config = tiny_checkpoints.CONFIGS[name]().to_dict()
    counts = LAYER_COUNTS & config.keys()
    assert counts
    for field in counts:
        error = refusal(config | {field: 10**12})
        assert f"field {field!r} is {10**12}, expected at most 10,000" in error.message


@families
def test_a_missing_field_is_named(kind):
    always = {"model_type", "bos_token_id", "eos_token_id"}
    optional = {"num_key_value_heads"} if kind == "llama" else set()
    for field in SIZED[kind] - always - optional:
        config = minimal(kind)
        del config[field]
        assert f"field {field!r} is missing, expected int" in refusal(config).message


@families
@pytest.mark.parametrize("value", ["32", 32.0, True, [32], {}])
def test_a_size_of_the_wrong_type_is_named(kind, value):
    for field in SIZED[kind] - {"eos_token_id"}:
        error = refusal(minimal(kind, **{field: value}))
        assert f"field {field!r} is {value!r}, expected int" in error.message


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("llama", {"hidden_act": "mish"}, "hidden_act is 'mish'"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function is 'tanh'"),
        ("gemma2", {"hidden_activation": "mish"}, "hidden_activation is 'mish'"),
        ("llama", {"rope_scaling": {"type": "longrope"}}, "rotary positions of type 'longrope'"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0, "long_factor": [1.0]}},
            "rope_parameters: field 'long_factor' (value [1.0]) is not supported",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "rope_parameters: field 'partial_rotary_factor' (value 0.5) is not supported",
        ),
        ("llama", {"rope_scaling": {"type": "linear"}}, "field 'factor' is missing"),
        ("llama", {"num_attention_heads": 5}, "5 attention heads do not divide hidden size 32"),
        ("llama", {"eos_token_id": ["end"]}, "field 'eos_token_id' is ['end']"),
        ("llama", {"eos_token_id": True}, "field 'eos_token_id' is True"),
        ("llama", {"rms_norm_eps": math.nan}, "field 'rms_norm_eps' is nan"),
        (
            "qwen2",
            {"layer_types": ["full_attention"]},
            "layer_types has 1 entries, num_hidden_layers is 8",
        ),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 4,
                "layer_types": ["sliding_attention"] * 7 + ["chunked_attention"],
            },
            "layer_types has ['chunked_attention']",
        ),
        ("gemma2", {"layer_types": ["odd_attention"] * 8}, "layer_types has ['odd_attention']"),
        ("qwen3_moe", {"mlp_only_layers": ["one"]}, "field 'mlp_only_layers' is ['one']"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "field 'decoder_sparse_step' is 0"),
        ("qwen3_moe", {"num_experts": 0}, "field 'num_experts' is 0"),
        ("gemma2", {"query_pre_attn_scalar": -4}, "field 'query_pre_attn_scalar' is -4"),
        ("gemma3_text", {"sliding_window_pattern": -1}, "'sliding_window_pattern' is -1"),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": {}, "chunked_attention": {}}},
            "field 'chunked_attention'",
        ),
        ("gemma3_text", {"rope_parameters": {"full_attention": 3}}, "field 'full_attention' is 3"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("exaone4", {"sliding_window_pattern": [1, 2]}, "'sliding_window_pattern' is [1, 2]"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries"),
        ("qwen3_next", {"linear_num_key_heads": 0}, "field 'linear_num_key_heads' is 0"),
        ("lfm2", {"conv_L_cache": -1}, "field 'conv_L_cache' is -1"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "field 'kv_lora_rank' is 0"),
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act is 'gelu' in a model with delta nets"),
        (
            "hunyuan_v1_dense",
            {"rope_parameters": {"rope_type": "linear", "alpha": 50.0, "factor": 3.0}},
            "alpha 50 with rope_type linear",
        ),
    ],
    ids=str,
)
def test_what_would_be_computed_wrongly_is_refused(kind, fields, message):
    assert message in refusal(minimal(kind, **fields)).message


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.floats()
    | st.sampled_from(["", "x", "silu", "linear", "yarn", "full_attention", "sliding_attention"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["rope_type", "factor", "rope_theta", "full_attention", "x"]), inner
        )
    ),
    max_leaves=5,
)


@given(kind=st.sampled_from(list(FAMILIES)), data=st.data())
def test_any_config_is_a_spec_or_an_error_of_one_line(kind, data):
    """Whatever a file says, nothing but a CairnError comes out."""
    known = sorted(
        {
            *as_transformers_reads_it(minimal(kind)),
            "rope_scaling",
            "rope_theta",
            "rope_local_base_freq",
            "sliding_window_pattern",
        }
    )
    changes = data.draw(st.dictionaries(st.sampled_from(known), JSON, min_size=1, max_size=3))
    config = json.loads(json.dumps(minimal(kind, **changes)))
    try:
        spec = from_hf(config)
    except CairnError as caught:
        problem = caught
    else:
        assert spec.parameters() > 0
        assert spec.scale > 0
        assert all(isinstance(id, int) for id in spec.eos_ids)
        return
    assert "\n" not in problem.message
    assert problem.hint


# -- there and back -----------------------------------------------------------------------------


def plain(spec: ModelSpec) -> ModelSpec:
    """Two ways to say the same are one: the default scale, and windows on no layer."""
    fields = {name: getattr(spec, name) for name in spec.__struct_fields__}
    windows = spec.windows if any(spec.windows) else ()
    return ModelSpec(**fields | {"query_scale": round(spec.scale, 12), "windows": windows})


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_the_way_to_a_config_and_back(name):
    config = to_hf(preset(name))
    assert plain(from_hf(config)) == plain(preset(name))
    assert plain(from_hf(as_transformers_reads_it(config))) == plain(preset(name))


@st.composite
def ropes(draw, kinds: list[str], context: int) -> Rope:
    rope = {"theta": draw(st.floats(100, 1e7)), "kind": draw(st.sampled_from(kinds))}
    if rope["kind"] != "default":
        rope["factor"] = draw(st.sampled_from([1.5, 2.0, 8.0]))
    if rope["kind"] in ("dynamic", "llama3", "yarn"):
        rope["original_context"] = context if rope["kind"] == "dynamic" else context // 8
    if rope["kind"] == "llama3":
        rope |= {"low_freq_factor": 1.5, "high_freq_factor": draw(st.floats(2, 9))}
    if rope["kind"] == "yarn":
        rope |= {
            "beta_fast": draw(st.floats(8, 40)),
            "beta_slow": draw(st.floats(0.5, 4)),
            "attention_factor": draw(st.none() | st.floats(0.5, 2)),
            "mscale": draw(st.sampled_from([0.0, 0.7])),
            "mscale_all_dim": draw(st.sampled_from([0.0, 1.3])),
            "truncate": draw(st.booleans()),
        }
    return Rope(**rope)


def any_windows(layers: int) -> st.SearchStrategy:
    window = st.shared(st.integers(1, 30), key="window")
    return st.lists(st.just(0) | window, min_size=layers, max_size=layers).map(tuple)


def all_or_none(layers: int) -> st.SearchStrategy:
    return st.just(()) | st.integers(1, 30).map(lambda window: (window,) * layers)


@st.composite
def expressible(draw, family: str) -> ModelSpec:
    """A spec that a checkpoint of this family can have."""
    flag, size = st.booleans(), st.integers(1, 40)
    layers, kv_heads, context = draw(st.integers(1, 7)), draw(st.integers(1, 3)), 64
    heads = kv_heads * draw(st.integers(1, 3))
    hidden = heads * draw(st.integers(1, 9))
    fields = dict(
        family=family, vocab=draw(size), hidden=hidden, layers=layers, heads=heads,
        kv_heads=kv_heads, head_dim=2 * draw(size), intermediate=draw(size), context=context,
        tied=draw(flag), norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        activation=draw(st.sampled_from(["silu", "gelu", "gelu_tanh", "relu"])),
        bos_id=draw(st.none() | st.integers(0, 9)),
        eos_ids=tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
    )  # fmt: skip
    if family == "gpt2":
        return ModelSpec(
            **fields
            | dict(
                kv_heads=heads,
                head_dim=hidden // heads,
                norm="layer",
                qkv_bias=True,
                out_bias=True,
                mlp_bias=True,
                gated=False,
                positions="learned",
            )
        )
    kinds = (
        ["default", "linear"]
        if family == "gemma3"
        else ["default", "linear", "dynamic", "llama3", "yarn"]
    )
    rope = fields["rope"] = draw(ropes(kinds, context))
    if rope.kind == "dynamic":
        fields["context"] = int(context * rope.factor)
    bias = draw(flag)
    if family in ("llama", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3"):
        fields |= {"qkv_bias": bias, "out_bias": bias}
    if family == "llama":
        fields["mlp_bias"] = draw(flag)
    if family in ("mistral", "mixtral", "qwen3_moe"):
        fields["windows"] = draw(all_or_none(layers))
    if family in ("qwen2", "qwen3", "gemma2", "gemma3"):
        fields["windows"] = draw(any_windows(layers))
    if family == "qwen2":
        fields["qkv_bias"] = True
    if family in ("qwen3", "qwen3_moe", "gemma3"):
        fields["qk_norm"] = True
    if family in ("mixtral", "qwen3_moe"):
        count = draw(st.integers(1, 9))
        moe = dict(count=count, per_token=draw(st.integers(1, count)), intermediate=draw(size))
        if family == "mixtral":
            moe["intermediate"] = fields["intermediate"]
        else:
            moe["renormalize"] = draw(flag)
            moe["dense_layers"] = tuple(sorted(draw(st.sets(st.integers(0, layers - 1)))))
        fields["experts"] = Experts(**moe)
    if family in ("gemma2", "gemma3"):
        fields |= dict(
            norm_plus_one=True,
            post_norms=True,
            embedding_scale=hidden**0.5,
            query_scale=draw(st.integers(1, 400)) ** -0.5,
            attention_softcap=draw(st.sampled_from([0.0, 30.0])),
            logit_softcap=draw(st.sampled_from([0.0, 50.0])),
        )
    if family == "gemma":
        fields |= dict(norm_plus_one=True, embedding_scale=hidden**0.5, activation="gelu_tanh")
    if family == "gemma3":
        fields["rope_local"] = Rope(theta=draw(st.floats(100, 1e7)))
    return ModelSpec(**fields)


# The others: test_llama_like_families.
ELSEWHERE = DESCRIBED | EXPERT_FAMILIES | SPARSE | RECURRENT | UNKNOWN_TO_TRANSFORMERS
DEEP = FAMILIES.keys() - ELSEWHERE.keys()


@pytest.mark.parametrize("family", sorted("gemma3" if k == "gemma3_text" else k for k in DEEP))
@given(data=st.data())
def test_any_spec_of_a_family_survives_the_way_to_a_config_and_back(family, data):
    spec = data.draw(expressible(family))
    config = to_hf(spec, torch.bfloat16)
    assert config["dtype"] == "bfloat16"
    assert plain(from_hf(json.loads(json.dumps(config)))) == plain(spec)
    assert plain(from_hf(as_transformers_reads_it(config))) == plain(spec)


@pytest.mark.parametrize("layers", [6, 7])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize("last", [-1, 4])
def test_layers_with_experts_of_ernie_survive_the_way_to_a_config_and_back(
    layers, every, first, last
):
    fields = {"num_hidden_layers": layers, "moe_layer_interval": every}
    fields |= {"moe_layer_start_index": first, "moe_layer_end_index": last}
    family = {"model_type": "ernie4_5_moe", "hidden_act": "silu", "rms_norm_eps": 1e-6}
    spec = from_hf(family | WITH_MORE_FIELDS["ernie4_5_moe"][0] | fields)
    end = layers - 1 if last == -1 else last
    sparse = {i for i in range(layers) if first <= i <= end and (i + 1) % every == 0}
    assert set(range(layers)) - set(spec.experts.dense_layers) == sparse
    assert plain(from_hf(to_hf(spec))) == plain(spec)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tiny-llama", {"windows": (8, 8, 8)}, "windows is (8, 8, 8)"),
        ("tiny-llama", {"qk_norm": True}, "qk_norm is True"),
        ("tiny-llama", {"qkv_bias": True}, "out_bias is False"),
        ("tiny-qwen3", {"windows": (4, 8, 0)}, "windows is (4, 8, 0)"),
        ("tiny-qwen3", {"logit_softcap": 3.0}, "logit_softcap is 3.0"),
        (
            "tiny-moe",
            {"experts": Experts(count=6, per_token=2, intermediate=24, gate="sigmoid")},
            "experts is Experts(count=6",
        ),
        ("tiny-gemma3", {"rope_local": Rope(kind="linear", factor=2.0)}, "rope_local is Rope("),
        ("tiny-gemma3", {"embedding_scale": 1.0}, "embedding_scale is 1.0"),
        ("tiny-gpt2", {"norm_eps": 1e-5, "qkv_bias": False}, "qkv_bias is False"),
    ],
    ids=str,
)
def test_a_spec_that_the_format_cannot_say_is_refused_not_changed(name, changes, message):
    spec = preset(name)
    fields = {field: getattr(spec, field) for field in spec.__struct_fields__}
    with pytest.raises(UnsupportedModel) as caught:
        to_hf(ModelSpec(**fields | changes))
    assert message in caught.value.message


def test_a_family_without_a_format_is_refused():
    spec = preset("tiny-llama")
    fields = {field: getattr(spec, field) for field in spec.__struct_fields__}
    with pytest.raises(UnsupportedModel, match="'odd'"):
        to_hf(ModelSpec(**fields | {"family": "odd"}))


# Fields of published configs that the reference reads nowhere, beside those that give the model its size.
WITH_MORE_FIELDS = {
    "minimax_m2": (
        dict(
            hidden_size=3072, intermediate_size=1536, num_hidden_layers=62, num_attention_heads=48,
            num_key_value_heads=8, head_dim=128, num_local_experts=256, vocab_size=200_064,
            max_position_embeddings=196_608, rope_theta=5_000_000, rotary_dim=64, attn_type_list=[1] * 62,
            scoring_func="sigmoid", use_routing_bias=True, use_qk_norm=True, qk_norm_type="per_layer",
            layernorm_full_attention_beta=1.0, layernorm_linear_attention_beta=1.0, layernorm_mlp_beta=1.0,
            mlp_intermediate_size=8192, shared_intermediate_size=0, shared_moe_mode="sigmoid",
            sliding_window=None, use_mtp=True, num_mtp_modules=3, mtp_transformer_layers=1,
        ),
        228.7,
        ("scoring_func", "softmax"),
    ),
    "ernie4_5_moe": (
        dict(
            hidden_size=2560, intermediate_size=12_288, num_hidden_layers=28, num_attention_heads=20,
            num_key_value_heads=4, vocab_size=103_424, max_position_embeddings=131_072, rope_theta=500_000,
            moe_num_experts=64, moe_k=6, moe_intermediate_size=1536, moe_num_shared_experts=2,
            moe_layer_start_index=1, moe_layer_end_index=27, moe_layer_interval=1, tie_word_embeddings=True,
            moe_capacity=[64, 64, 64], moe_gate="topk", moe_use_aux_free=True, num_nextn_predict_layers=1,
        ),
        21.8,
        ("moe_use_aux_free", False),
    ),
    "qwen3_next": (
        dict(
            hidden_size=2048, intermediate_size=5120, num_hidden_layers=48, num_attention_heads=16,
            num_key_value_heads=2, head_dim=256, vocab_size=151_936, max_position_embeddings=262_144,
            rope_theta=10_000_000, partial_rotary_factor=0.25, num_experts=512, num_experts_per_tok=10,
            moe_intermediate_size=512, shared_expert_intermediate_size=512, full_attention_interval=4,
            use_sliding_window=False,
        ),
        79.7,
        ("use_sliding_window", True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", WITH_MORE_FIELDS)
def test_a_published_config_opens_and_says_nothing_that_is_passed_over(family):
    config, billions, (field, other) = WITH_MORE_FIELDS[family]
    config = {"model_type": family, "hidden_act": "silu", "rms_norm_eps": 1e-6} | config
    assert round(from_hf(config).parameters() / 1e9, 1) == billions
    with pytest.raises(UnsupportedModel, match=field):
        from_hf(config | {field: other})
