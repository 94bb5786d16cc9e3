"""A GGUF file reads as the checkpoint it was converted from: same names, values and config."""

import copy
import json

import gguf
import numpy as np
import pytest
import shared_data
import tiny_gguf
import torch
import transformers
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from cairn.core.errors import UnsupportedModel, WeightsError
from cairn.models.attend import PackedDocuments
from cairn.models.checkpoint import open_checkpoint
from cairn.models.families import from_hf
from cairn.models.gguf.block_types import BLOCK_TYPES
from cairn.models.gguf.file import GGUFFile
from cairn.models.gguf.write import write_gguf
from cairn.models.quantized.round_model import round_model
from cairn.models.quantized.rounding import SCHEMES
from cairn.models.safetensors_file import SafetensorsFolder
from cairn.models.stacked_experts import split_experts

NAMES = list(tiny_gguf.CONFIGS)
KNOWN_TO_TRANSFORMERS = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "phi3",
    "lfm2",
    "gpt2",
)


@pytest.fixture(scope="module", params=NAMES)
def converted(request, tmp_path_factory):
    """A model, its tensors by their names on the Hub, and the GGUF file made of them."""
    model, tensors = tiny_gguf.checkpoint(request.param)
    path = tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf"
    return model, tensors, tiny_gguf.convert(model.config, tensors, path)


def small_file(path, metadata=None, tensors=None, layers=1, architecture="llama"):
    """The least that opens: an embedding of 256 columns and one norm per layer."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(layers)
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(512)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in (metadata or {}).items():
        tiny_gguf.write_key(writer, key, value)
    norms = {f"blk.{n}.attn_norm.weight": np.zeros(256, np.float32) for n in range(layers)}
    embedding = {"token_embd.weight": np.zeros((3, 256), np.float32)}
    for name, values in (embedding | norms | (tensors or {})).items():
        data, kind = values if isinstance(values, tuple) else (values, Type.F32)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# -- against the checkpoint that was converted, and against transformers --------------------------


def test_names_shapes_and_values_are_those_of_the_checkpoint(converted):
    _, tensors, path = converted
    file = GGUFFile(path)
    assert set(file.names()) == set(tensors)
    for name, expected in tensors.items():
        assert file.shape(name) == tuple(expected.shape), name
        assert file.dtype(name) == torch.float32
        tensor = file.tensor(name)
        assert tensor.is_contiguous()
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=2e-7, msg=name)


def test_transformers_runs_what_was_read(converted, tmp_path):
    """Written out as config.json and safetensors, the file is the same model to `transformers`."""
    model, _, path = converted
    file = GGUFFile(path)
    config = {
        "pad_token_id": None
    } | file.config()  # SmolLM3's default is not in a small vocabulary
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {name: file.tensor(name).clone() for name in file.names()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    tokens = torch.arange(200).reshape(2, 100) * 7 % 151 + 3  # longer than any window here
    with torch.no_grad():
        expected, logits = model(tokens).logits, again.eval()(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_transformers_reads_the_file_alike(converted):
    model, _, path = converted
    kind = getattr(model.config, "rope_parameters", None) or {}
    known = model.config.model_type.removesuffix("_text") in KNOWN_TO_TRANSFORMERS
    if not known or kind.get("rope_type") == "longrope":
        pytest.skip(f"transformers does not read {model.config.model_type} from GGUF")
    file = GGUFFile(path)
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert set(read["tensors"]) == set(model.state_dict()) - tied
    again = copy.deepcopy(model)
    again.load_state_dict(read["tensors"], strict=False)
    for name, expected in tiny_gguf.hub_tensors(again).items():
        torch.testing.assert_close(file.tensor(name), expected, rtol=0, atol=0, msg=name)
    config = file.config()
    unknown_to_hub = {"_model_name_or_path", "feed_forward_length", "n_ctx"}
    unknown_to_hub |= (
        {"rms_norm_eps", "full_attn_idxs"} if model.config.model_type == "lfm2" else set()
    )
    for key, value in read["config"].items():
        if key not in unknown_to_hub:
            assert config[key] == (pytest.approx(value) if isinstance(value, float) else value)


def test_config_says_what_the_checkpoint_said(converted):
    model, _, path = converted
    expected, config = model.config.to_dict(), GGUFFile(path).config()
    rope = expected.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    expected |= {
        "architectures": [type(model).__name__],
        "rope_theta": rope.get("rope_theta"),
        "rope_scaling": None,
        "rope_local_base_freq": 10_000.0,
        "partial_rotary_factor": rope.get("partial_rotary_factor"),
        "head_dim": expected.get("head_dim") or 16,
        "n_inner": 256,
        "num_experts": expected.get("num_local_experts") or expected.get("num_experts"),
    }
    scaling = config.pop("rope_scaling", None) or config.pop("rope_parameters", None)
    assert config == {key: expected[key] for key in config}
    if rope.get("rope_type", "default") == "default":
        assert scaling is None
    else:
        assert isinstance(scaling, dict)
        assert {key: rope.get(key, scaling[key]) for key in scaling} == scaling
        assert scaling["rope_type"] == rope["rope_type"]


def test_cairn_sees_the_model_that_it_sees_in_the_checkpoint(converted):
    model, _, path = converted
    assert from_hf(GGUFFile(path).config()) == from_hf(model.config.to_dict())


def _gpt_oss():
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 32}
    sizes = tiny_gguf.SIZES | {"num_hidden_layers": 4, "pad_token_id": 0}
    return transformers.GptOssConfig(
        **sizes, num_local_experts=6, num_experts_per_tok=2, sliding_window=16, rope_parameters=rope
    )


def _granite4():
    sizes = {key: value for key, value in tiny_gguf.SIZES.items() if key != "head_dim"}
    return transformers.GraniteMoeHybridConfig(
        **sizes, layer_types=["full_attention"] * 3, num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=1,
        shared_intermediate_size=96, position_embedding_type="rope", embedding_multiplier=3.0,
        attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=2.0,
    )  # fmt: skip


def _qwen3_5_moe():
    return transformers.Qwen3_5MoeTextConfig(**tiny_gguf.DELTA, **tiny_gguf.DELTA_EXPERTS)


def test_experts_that_a_checkpoint_stacks_are_written_as_a_file_has_them(tmp_path):
    config = _gpt_oss()
    save_file(tiny_gguf.hub_tensors(tiny_gguf.random_model(config)), tmp_path / "model.safetensors")
    single = split_experts(SafetensorsFolder(tmp_path), "gpt_oss")
    tensors = {name: single.tensor(name).contiguous() for name in single.names()}
    like = tiny_gguf.convert(config, tensors, tmp_path / "m.gguf")
    ours = open_checkpoint(like).load("cpu", torch.float32)
    made = round_model(ours, SCHEMES["q8_0"], torch.float16)
    back = open_checkpoint(write_gguf(made, tmp_path / "q", like, "q8_0"))
    assert back.spec == ours.spec
    found = dict(back.load("cpu", torch.float32).named_parameters())
    for name, value in ours.named_parameters():
        torch.testing.assert_close(found[name], value, atol=0.02, rtol=1e-5, msg=name)


@pytest.mark.parametrize("make", [_gpt_oss, _qwen3_5_moe, _granite4])
def test_a_file_whose_tensors_have_other_names_than_the_checkpoint_runs_alike(make, tmp_path):
    """Experts lie one by one, as no checkpoint of these families has them, or gate and up apart."""
    config = make()
    model = tiny_gguf.random_model(config)
    save_file(tiny_gguf.hub_tensors(model), tmp_path / "model.safetensors")
    single = split_experts(SafetensorsFolder(tmp_path), "gpt_oss")
    tensors = {name: single.tensor(name).contiguous() for name in single.names()}
    opened = open_checkpoint(tiny_gguf.convert(config, tensors, tmp_path / "m.gguf"))
    tokens_T = torch.arange(100) * 7 % 151 + 3
    attend = PackedDocuments([100])
    ours = opened.load("cpu", torch.float32)
    with torch.no_grad():
        logits = ours.logits(ours(tokens_T, attend.positions_T(), attend))
        expected = model(tokens_T[None]).logits[0]
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
def test_two_tensors_that_are_one_have_to_fit(name, tmp_path):
    """Joined as the converter cut them; one without the other, or of another shape, is an error that names both."""
    model, tensors = tiny_gguf.checkpoint(name)
    parts = {"deepseek_v3": ("attn_k_b", "attn_v_b"), "qwen3_next": ("attn_qkv", "attn_gate")}[name]
    stored = dict(tiny_gguf.stored_tensors(model.config, tensors))
    for part in parts:
        kept = {key: value for key, value in stored.items() if f".{part}." not in key}
        path = tiny_gguf.write(model.config, kept.items(), tmp_path / f"{part}.gguf")
        with pytest.raises(WeightsError, match=r"attn_.*and.*attn_"):
            GGUFFile(path)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    """Whether the file has their tensors, or only says how many there were."""
    model, tensors = tiny_gguf.checkpoint("glm4_moe")
    stored = dict(tiny_gguf.stored_tensors(model.config, tensors))
    further = {
        "blk.3.nextn.eh_proj.weight": torch.zeros(64, 128),
        "blk.3.attn_norm.weight": torch.zeros(64),
    }
    more = {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    for kept in (stored | further, stored):
        path = tiny_gguf.write(model.config, kept.items(), tmp_path / "m.gguf", metadata=more)
        file = GGUFFile(path)
        assert set(file.names()) == set(tensors)
        assert file.config()["num_hidden_layers"] == 3


def test_experts_need_not_be_shared(tmp_path):
    """The largest ERNIE 4.5 has no shared experts, and its file says so by a zero."""
    model, tensors = tiny_gguf.checkpoint("ernie4_5_moe")
    stored = dict(tiny_gguf.stored_tensors(model.config, tensors))
    kept = {name: value for name, value in stored.items() if "_shexp" not in name}
    more = {"ernie4_5-moe.expert_shared_count": 0}
    path = tiny_gguf.write(model.config, kept.items(), tmp_path / "m.gguf", metadata=more)
    opened = open_checkpoint(path)
    assert opened.spec.experts.shared_intermediate == 0
    assert opened.load("cpu", torch.float32) is not None


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("phi3-longrope", "phi3.rope.scaling.original_context_length", 1),
        ("glm4_moe", "glm4moe.leading_dense_block_count", 1 << 31),
    ],
)
def test_sizes_that_cannot_be_are_refused(name, key, value, tmp_path):
    model, tensors = tiny_gguf.checkpoint(name)
    stored = tiny_gguf.stored_tensors(model.config, tensors)
    path = tiny_gguf.write(model.config, stored, tmp_path / "m.gguf", metadata={key: value})
    with pytest.raises(WeightsError, match=f"{key} = {value}"):
        GGUFFile(path)


def test_stories_are_the_safetensors_they_came_from():
    folder = shared_data.model_folder("stories260K")
    file = GGUFFile(shared_data.shared("models", "stories260K.gguf"))
    expected = load_file(folder / "model.safetensors")
    for name, tensor in expected.items():
        assert torch.equal(file.tensor(name), tensor), name
    # The conversion wrote the tied output a second time.
    assert set(file.names()) - set(expected) == {"lm_head.weight"}
    assert torch.equal(file.tensor("lm_head.weight"), expected["model.embed_tokens.weight"])
    config, stated = file.config(), json.loads((folder / "config.json").read_text())
    same = set(stated) & set(config) - {"tie_word_embeddings"}
    assert {key: config[key] for key in same} == {key: stated[key] for key in same}


def test_smollm2_opens():
    file = GGUFFile(shared_data.packaged_chat_model(), dequantize_to=torch.bfloat16)
    config = file.config()
    assert {
        "model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "head_dim": 64,
        "num_attention_heads": 9, "num_key_value_heads": 3, "rope_theta": 100_000.0,
        "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
        "rope_scaling": None, "bos_token_id": 1, "eos_token_id": 2,
    }.items() <= config.items()  # fmt: skip
    assert len(file.names()) == 272
    assert file.shape("model.layers.29.self_attn.k_proj.weight") == (192, 576)
    assert file.tensor("model.layers.0.mlp.up_proj.weight").dtype == torch.bfloat16
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    assert (len(tokens), tokens[1]) == (49152, "<|im_start|>")


# -- numbers ------------------------------------------------------------------------------------


def largest_error(kind: Type, blocks: torch.Tensor) -> torch.Tensor:
    """Per block of 32: half a step, or a whole one where the range is not symmetric."""
    spread, largest = blocks.amax(1) - blocks.amin(1), blocks.abs().amax(1)
    steps = {
        Type.Q8_0: largest / 127 / 2,
        Type.Q4_0: largest / 8,
        Type.Q4_1: spread / 15 / 2,
        Type.Q5_0: largest / 16,
        Type.Q5_1: spread / 31 / 2,
    }
    return steps[kind] + largest * 2.0**-9  # scale and minimum are rounded to float16


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1])
def test_dequantised_values_are_within_a_step(tmp_path, kind):
    values = torch.randn(5000, 256, generator=torch.Generator().manual_seed(1))  # over one piece
    data = gguf.quants.quantize(values.numpy(), kind)
    path = small_file(tmp_path / "m.gguf", tensors={"token_embd.weight": (data, kind)})
    blocks = values.reshape(-1, 32)
    error = (GGUFFile(path).tensor("model.embed_tokens.weight").reshape(-1, 32) - blocks).abs()
    assert (error.amax(1) <= largest_error(kind, blocks)).all()


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "MXFP4"])
def test_pieces_join_to_what_gguf_dequantises_at_once(tmp_path, kind):
    kind = Type[kind]
    elements, size_bytes = gguf.GGML_QUANT_SIZES[kind]
    shape = (4200, 256 // elements * size_bytes)
    data = np.random.default_rng(0).integers(0, 120, shape, dtype=np.uint8)  # finite as float16
    path = small_file(tmp_path / "m.gguf", tensors={"token_embd.weight": (data, kind)})
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    assert torch.equal(GGUFFile(path).tensor("model.embed_tokens.weight"), expected)
    half = GGUFFile(path, dequantize_to=torch.bfloat16)
    assert half.dtype("model.embed_tokens.weight") == torch.bfloat16
    assert torch.equal(half.tensor("model.embed_tokens.weight"), expected.bfloat16())


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gpt2", "gemma3"])
def test_a_whole_file_in_q8_0(tmp_path, name):
    model, tensors = tiny_gguf.checkpoint(name)
    path = tiny_gguf.convert(model.config, tensors, tmp_path / "m.gguf", matrices=Type.Q8_0)
    file = GGUFFile(path)
    for name, expected in tensors.items():
        tolerance = expected.abs().max() / 254 * 1.1 if expected.ndim > 1 else 1e-6
        assert (file.tensor(name) - expected).abs().max() <= tolerance, name


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16])
def test_unquantised_types_stay_as_stored(tmp_path, kind):
    model, tensors = tiny_gguf.checkpoint("llama")
    path = tiny_gguf.convert(model.config, tensors, tmp_path / "m.gguf", matrices=kind)
    file = GGUFFile(path)
    dtype = torch.float16 if kind == Type.F16 else torch.bfloat16
    for name, expected in tensors.items():
        stored = expected.to(dtype) if expected.ndim > 1 else expected
        assert file.dtype(name) == stored.dtype
        assert torch.equal(file.tensor(name), stored), name


def test_plain_tensors_are_views_that_outlive_the_file_and_never_write_to_it(tmp_path):
    path = small_file(tmp_path / "m.gguf")
    before = path.read_bytes()
    with GGUFFile(path) as file:
        view, again = (file.tensor("model.embed_tokens.weight") for _ in range(2))
        assert view.data_ptr() == again.data_ptr()
    view += 1.0
    assert again.sum() == view.numel()
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="closed"):
        file.tensor("model.embed_tokens.weight")


# -- conventions of other converters and other times ----------------------------------------------


def test_experts_one_by_one_as_converted_before_2024(tmp_path):
    model, tensors = tiny_gguf.checkpoint("mixtral")
    path = tiny_gguf.convert(model.config, tensors, tmp_path / "m.gguf", stacked=False)
    file = GGUFFile(path)
    assert set(file.names()) == set(tensors)
    assert all(torch.equal(file.tensor(name), tensors[name]) for name in tensors)


@pytest.mark.parametrize(("layers", "scalar"), [(26, 256), (46, 64)])
def test_only_depth_tells_how_the_largest_gemma_scales_queries(tmp_path, layers, scalar):
    metadata = {"gemma2.attention.key_length": 256}
    path = small_file(tmp_path / "m.gguf", metadata, layers=layers, architecture="gemma2")
    config = GGUFFile(path).config()
    assert config["query_pre_attn_scalar"] == scalar
    assert (config["sliding_window"], config["attn_logit_softcapping"]) == (4096, 50.0)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.attention.sliding_window": 32}, {"model_type": "mistral", "sliding_window": 32}),
        ({"llama.attention.head_count_kv": [2]}, {"num_key_value_heads": 2}),
        ({"llama.rope.freq_base": 5e5}, {"rope_theta": 5e5}),
        (
            {"llama.rope.scaling.factor": 2.0},
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
        ({"llama.rope.scaling.type": "none"}, {"rope_scaling": None}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
                "llama.rope.scaling.yarn_beta_slow": 2.0,
            },
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "beta_fast": 16.0,
                    "beta_slow": 2.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
        ({"llama.tensor_data_layout": "Meta AI original pth"}, {"model_type": "llama"}),
        (
            {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 2},
            {"eos_token_id": [1, 2]},
        ),
        ({"llama.attention.causal": True, "someone.quantized_by": "them"}, {"hidden_size": 256}),
        ({"llama.expert_count": 0, "llama.expert_used_count": 0}, {"model_type": "llama"}),
    ],
)
def test_metadata_becomes_config(tmp_path, metadata, expected):
    config = GGUFFile(small_file(tmp_path / "m.gguf", metadata)).config()
    assert {key: config[key] for key in expected} == expected


def test_gemma3_windows_as_flags_per_layer(tmp_path):
    metadata = {
        "gemma3.rope.freq_base": 1e6,
        "gemma3.attention.sliding_window": 8,
        "gemma3.attention.sliding_window_pattern": [False, True],
    }
    path = small_file(tmp_path / "m.gguf", metadata, layers=2, architecture="gemma3")
    assert GGUFFile(path).config()["layer_types"] == ["full_attention", "sliding_attention"]


# -- what would be computed wrongly is refused ----------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.attention.scale": 0.5}, r"llama\.attention\.scale = 0\.5"),
        ({"llama.logit_scale": 2.0}, r"llama\.logit_scale"),
        ({"llama.attention.causal": False}, r"attention\.causal = False"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope'"),
        ({"llama.rope.scaling.yarn_ext_factor": 0.5}, "yarn_ext_factor"),
        ({"llama.rope.dimension_count": 32}, r"rope\.dimension_count = 32 with keys of 64"),
        ({"llama.attention.value_length": 32}, "value_length = 32"),
        ({"llama.attention.head_count_kv": [4, 2]}, "a value per layer"),
        ({"split.count": 3}, "one of the 3 parts"),
        ({"general.type": "adapter"}, "'adapter'"),
        ({"general.quantization_version": 1}, "quantisation version 1"),
    ],
)
def test_refuses_metadata_it_does_not_understand(tmp_path, metadata, message):
    with pytest.raises(UnsupportedModel, match=message) as error:
        GGUFFile(small_file(tmp_path / "m.gguf", metadata))
    assert error.value.hint


def test_refuses_an_unknown_architecture(tmp_path):
    with pytest.raises(UnsupportedModel, match="architecture 'mamba'"):
        GGUFFile(small_file(tmp_path / "m.gguf", architecture="mamba"))


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_q.scale",
        "blk.0.attn_sinks.weight",
        "blk.0.attn_norm.bias",
        "d2t.weight",
        "blk.0.ffn_gate_exps.weight",
        "blk.0.ffn_gate.1.weight",
        "blk.0.token_embd.weight",
    ],
)
def test_refuses_a_tensor_it_does_not_know(tmp_path, name):
    path = small_file(tmp_path / "m.gguf", tensors={name: np.zeros((2, 256), np.float32)})
    with pytest.raises(UnsupportedModel, match=name.replace(".", r"\.")):
        GGUFFile(path)


def test_recognises_the_rotary_factors_of_llama_3_only(tmp_path):
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    path = small_file(tmp_path / "m.gguf", tensors={"rope_freqs.weight": factors})
    with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight = \[1\.0, "):
        GGUFFile(path)
    ones = {"rope_freqs.weight": np.ones(32, np.float32)}
    assert GGUFFile(small_file(path, tensors=ones)).config()["rope_scaling"] is None
    for wrong in (np.full(31, 2.0), np.full(32, 2.0), np.zeros(32), np.full(32, np.nan)):
        damaged = {"rope_freqs.weight": wrong.astype(np.float32)}
        with pytest.raises(UnsupportedModel, match="rope_freqs"):
            GGUFFile(small_file(path, tensors=damaged))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.freq_base": float("nan")}, "rope.freq_base = nan"),
        ({"llama.attention.key_length": 0}, "key_length = 0"),
        ({"llama.attention.key_length": "x"}, "key_length = 'x'"),
        ({"llama.expert_used_count": 2}, "expert_used_count = 2"),
    ],
)
def test_refuses_values_that_make_no_sense(tmp_path, metadata, message):
    with pytest.raises(WeightsError, match=message):
        GGUFFile(small_file(tmp_path / "m.gguf", metadata))


def test_metadata_and_tensors_have_to_agree(tmp_path):
    path = tmp_path / "m.gguf"
    wide = {"token_embd.weight": np.zeros((3, 128), np.float32)}
    with pytest.raises(WeightsError, match="embedding_length = 256 in place of 128"):
        GGUFFile(small_file(path, tensors=wide))
    third = {"blk.2.attn_norm.weight": np.zeros(256, np.float32)}
    with pytest.raises(WeightsError, match="block_count = 1 in place of 2"):
        GGUFFile(small_file(path, tensors=third))
    odd = {"blk.0.attn_q.weight": np.zeros((12, 256), np.float32)}
    with pytest.raises(WeightsError, match="for 4 heads"):
        GGUFFile(small_file(path, tensors=odd))


def test_asks_for_a_tensor_that_is_there(tmp_path):
    file = GGUFFile(small_file(tmp_path / "m.gguf"))
    with pytest.raises(WeightsError, match=r"has no tensor lm_head\.weight"):
        file.tensor("lm_head.weight")


def test_block_types_are_those_of_the_gguf_package():
    from gguf.constants import GGML_QUANT_SIZES

    known = {code: (block.elements, block.size_bytes) for code, block in BLOCK_TYPES.items()}
    theirs = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    assert theirs.items() <= known.items()
    assert all(
        block.name == kind.name for kind in GGML_QUANT_SIZES for block in [BLOCK_TYPES[kind]]
    )
