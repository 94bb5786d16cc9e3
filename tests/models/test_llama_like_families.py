"""Families that differ from Llama in a few fields compute what `transformers` computes, and are written back for it."""

import copy
import functools
import json
import warnings

import msgspec
import numpy as np
import pytest
import tiny_checkpoints
import torch
import transformers
from quantized_files import mxfp4_blocks
from safetensors.torch import save_file

from cairn.models.attend import Cached, KVCache, PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.checkpoint import open_checkpoint
from cairn.models.export import export
from cairn.models.linear.maps import held_bytes
from cairn.models.presets import preset
from cairn.models.quantized import load_experts
from cairn.models.runnable import OpenModel, Runnable
from cairn.models.transformer import Transformer
from cairn.models.weights import random_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start_with

SIZES = dict(
    vocab_size=99,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=160,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=None,
)
EXPERTS = dict(
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=12,
    n_shared_experts=2,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.5,
    norm_topk_prob=True,
    first_k_dense_replace=1,
)
LONG = dict(
    rope_type="longrope",
    short_factor=[1.0, 1.5, 2.0],
    long_factor=[2.0, 3.0, 4.0],
    factor=4.0,
    partial_rotary_factor=0.75,
)
CONFIGS = {
    "phi3": dict(original_max_position_embeddings=160, rope_parameters=LONG, sliding_window=9),
    "smollm3": dict(no_rope_layer_interval=2),
    "granite": dict(
        embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4,
        logits_scaling=2.0,
    ),
    "granitemoehybrid": dict(
        layer_types=["full_attention"] * 2, num_local_experts=0, num_experts_per_tok=0, mamba_n_heads=1,
        shared_intermediate_size=24, position_embedding_type="rope", embedding_multiplier=3.0,
        attention_multiplier=0.2, residual_multiplier=0.4, logits_scaling=2.0,
    ),
    "olmo2": dict(),
    "olmo3": dict(
        sliding_window=9, layer_types=["sliding_attention", "full_attention"], rope_parameters=dict(
            sliding_attention=dict(rope_type="default", rope_theta=5e5),
            full_attention=dict(
                rope_type="yarn", rope_theta=5e5, factor=4.0, original_max_position_embeddings=16
            ),
        ),
    ),
    "exaone4": dict(sliding_window=9, sliding_window_pattern=2),
    "seed_oss": dict(head_dim=16, attention_out_bias=True),
    "glm4": dict(head_dim=16),
    "glm4_moe": dict(head_dim=16, use_qk_norm=True, num_mtp_layers=0, **EXPERTS),
    "dots1": dict(**EXPERTS),
    "hunyuan_v1_dense": dict(
        head_dim=16, rope_parameters=dict(rope_type="dynamic", alpha=50.0, factor=1.0)
    ),
    "ministral3": dict(
        head_dim=16, rope_parameters=dict(
            rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16,
            llama_4_scaling_beta=0.3,
        ),
    ),
    "minimax_m2": dict(head_dim=16, rotary_dim=8, num_local_experts=6, num_experts_per_tok=2),
    "ernie4_5_moe": dict(
        moe_num_experts=6, moe_k=2, moe_intermediate_size=12, moe_num_shared_experts=1
    ),
}  # fmt: skip


def made(kind: str) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(kind, **SIZES | CONFIGS[kind])
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in name and value.is_floating_point():
                value.add_(torch.randn_like(value) * (0.12 if value.ndim > 1 else 0.3))
    return model.eval()


@functools.cache
def reference(name: str) -> transformers.PreTrainedModel:
    return tiny_checkpoints.reference(name) if name in tiny_checkpoints.CONFIGS else made(name)


def tokens(count: int) -> torch.Tensor:
    return torch.randint(0, 99, (count,), generator=torch.Generator().manual_seed(1))


def logits(model: Transformer, tokens_T: torch.Tensor) -> torch.Tensor:
    attend = PackedDocuments([len(tokens_T)])
    return model.logits(model(tokens_T, attend.positions_T(), attend))


def greedy(model: Transformer, prompt_T: torch.Tensor, count: int) -> torch.Tensor:
    """A continuation with a cache: the prompt in two pieces, then one token after another."""
    found_T, cache = prompt_T, KVCache(model.spec, len(prompt_T) + count, torch.float32, "cpu")
    pieces = list(prompt_T.split([len(prompt_T) // 2, len(prompt_T) - len(prompt_T) // 2]))
    for _ in range(count + 1):
        piece_T = pieces.pop(0)
        cached = Cached([cache], [len(piece_T)])
        scores_TV = model.logits(model(piece_T, cached.positions_T(), cached))
        cached.commit()
        if not pieces:
            pieces.append(scores_TV[-1:].argmax(-1))
            found_T = torch.cat((found_T, pieces[0]))
    return found_T


def served(model: Transformer, prompt: list[int], count: int) -> list[int]:
    """The same through the engine, twice: pages, the lean form, and then the prefix cache."""
    config = EngineConfig(model="tiny", device="cpu", max_model_len=128, num_gpu_blocks_override=32)
    opened = OpenModel("tiny", model.spec, None, (), None)
    engine = start_with(opened, Runnable("tiny", model, "a test"), config).engine
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    found = []
    for number in range(2):
        request = Request(number, prompt, params)
        engine.add(request)
        engine.run()
        found.append(request.outputs)
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize(
    "name", [*CONFIGS, *tiny_checkpoints.SPARSE_NAMES, *tiny_checkpoints.RECURRENT_NAMES]
)
@torch.no_grad()
def test_a_family_equals_the_reference_and_is_written_as_it_was_read(name, tmp_path):
    reference(name).save_pretrained(tmp_path / "theirs")
    opened = open_checkpoint(tmp_path / "theirs")
    model = opened.load("cpu", torch.float32).eval()
    assert model.spec.parameters() == sum(p.numel() for p in model.parameters())
    tokens_T = tokens(45)
    expected_TV = reference(name)(tokens_T[None]).logits[0]
    assert expected_TV.std() > 0.02
    torch.testing.assert_close(logits(model, tokens_T), expected_TV, rtol=0, atol=2e-4)

    found_T = greedy(model, tokens_T[:9], 64)
    best_T = reference(name)(found_T[None]).logits[0].argmax(-1)
    assert found_T[9:].tolist() == best_T[8:-1].tolist()

    prompt = tokens_T[:20].tolist()
    expected = greedy(model, tokens_T[:20], 12)[20:].tolist()
    assert served(copy.deepcopy(model), prompt, 12) == expected

    export(model, tmp_path / "ours")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "ours", attn_implementation="eager"
        ).eval()
    assert torch.equal(again(tokens_T[None]).logits[0], expected_TV)


@torch.no_grad()
def test_a_model_without_windows_of_a_family_with_windows_is_read_by_the_reference(tmp_path):
    """Its mask of a window is made whether or not a layer wants it."""
    spec = msgspec.structs.replace(preset("tiny-gpt-oss"), windows=(0,) * 4)
    model = random_model(spec, ModelBuild("cpu"), 1).eval()
    export(model, tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    ).eval()
    tokens_T = tokens(20) % spec.vocab
    expected_TV = theirs(tokens_T[None]).logits[0]
    torch.testing.assert_close(logits(model, tokens_T), expected_TV, rtol=0, atol=2e-4)


@torch.no_grad()
def test_experts_stacked_as_transformers_holds_them_are_read(tmp_path):
    model = reference("qwen3_5_moe")
    model.config.save_pretrained(tmp_path)
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    ours = open_checkpoint(tmp_path).load("cpu", torch.float32).eval()
    expected_TV = model(tokens(20)[None]).logits[0]
    torch.testing.assert_close(logits(ours, tokens(20)), expected_TV, rtol=0, atol=2e-4)


@torch.no_grad()
def test_experts_of_gpt_oss_in_mxfp4_are_read_as_they_are_published(tmp_path, monkeypatch):
    """Blocks and scales as openai/gpt-oss-20b stores them; the oracle has the values that they stand for."""
    config = transformers.GptOssConfig(
        **SIZES | dict(hidden_size=64, intermediate_size=32, head_dim=16, sliding_window=9),
        num_local_experts=3,
        num_experts_per_tok=2,
    )
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    chance, state = np.random.default_rng(4), model.state_dict()
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "down_proj"))]:
        experts, columns, rows = state[name].shape
        made = [mxfp4_blocks(chance, rows, columns) for _ in range(experts)]
        state[name].copy_(torch.stack([one.weight.t() for one in made]) / 16)
        for part in ("blocks", "scales"):
            stored = torch.stack([one.tensors[part] for one in made])
            state[f"{name}_{part}"] = stored - 4 if part == "scales" else stored  # 2 ** -4
    for name, value in state.items():
        if name.endswith("bias"):
            value.normal_(0, 0.3)
    expected_TV = model(tokens(20)[None]).logits[0]
    kept = {
        k: v.contiguous() for k, v in state.items() if not k.endswith(("gate_up_proj", "down_proj"))
    }
    save_file(kept, tmp_path / "model.safetensors")
    written = config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(written))
    opened = open_checkpoint(tmp_path)
    for notes in (None, []):  # dequantised, and as a server asks for them
        ours = opened.load("cpu", torch.float32, notes=notes).eval()
        torch.testing.assert_close(logits(ours, tokens(20)), expected_TV, rtol=0, atol=2e-4)
    monkeypatch.setattr(load_experts, "stays_packed", lambda device, size: True)  # a small GPU
    packed = opened.load("cpu", torch.float32, notes=[]).eval()
    assert held_bytes(packed) < held_bytes(ours)
    assert all(layer.feed_forward.forms is not None for layer in packed.layers)
    torch.testing.assert_close(logits(packed, tokens(20)), expected_TV, rtol=0, atol=2e-4)
