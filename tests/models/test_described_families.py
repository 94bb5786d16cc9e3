"""Families that differ from Llama in a few fields compute what `transformers` computes, packed and with a cache."""

import functools
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import transformers

from cairn.models.attend import Cached, KVCache, Packed
from cairn.models.build import Build
from cairn.models.export import tensors
from cairn.models.families import from_hf
from cairn.models.safetensors_file import SafetensorsFolder, read_json
from cairn.models.weights import load_model

SIZES = dict(
    vocab_size=99, hidden_size=32, intermediate_size=40, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=160, bos_token_id=1,
    eos_token_id=2, pad_token_id=None,
)  # fmt: skip
EXPERTS = dict(
    n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, n_shared_experts=2,
    n_group=4, topk_group=2, routed_scaling_factor=1.5, norm_topk_prob=True,
    first_k_dense_replace=1,
)  # fmt: skip
LONG = dict(
    rope_type="longrope", short_factor=[1.0, 1.5, 2.0], long_factor=[2.0, 3.0, 4.0], factor=4.0,
    partial_rotary_factor=0.75,
)  # fmt: skip
CONFIGS = {
    "phi3": dict(original_max_position_embeddings=160, rope_parameters=LONG, sliding_window=9),
    "smollm3": dict(no_rope_layer_interval=2),
    "granite": dict(
        embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.4,
        logits_scaling=2.0,
    ),
    "olmo2": dict(),
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


@functools.cache
def reference(kind: str) -> transformers.PreTrainedModel:
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
def folder(kind: str) -> Path:
    path = Path(_root().name) / kind
    reference(kind).save_pretrained(path)
    return path


@functools.cache
def _root() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cairn-described-")


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_a_family_equals_the_reference_packed_and_cached(kind):
    source = SafetensorsFolder(folder(kind))
    spec = from_hf(read_json(folder(kind) / "config.json"))
    model = load_model(spec, source, Build("cpu", torch.float32)).eval()
    tokens_T = torch.randint(0, 99, (45,), generator=torch.Generator().manual_seed(1))
    expected_TV = reference(kind)(tokens_T[None]).logits[0]
    assert expected_TV.std() > 0.02
    attend = Packed([45])
    ours_TV = model.logits(model(tokens_T, attend.positions_T(), attend))
    assert (ours_TV - expected_TV).abs().max() <= 2e-4
    cache = KVCache(spec, 45, torch.float32, "cpu")
    for piece_T, wanted_TV in zip(
        tokens_T.split([20, 1, 24]), expected_TV.split([20, 1, 24]), strict=True
    ):
        cached = Cached([cache], [len(piece_T)])
        got_TV = model.logits(model(piece_T, cached.positions_T(), cached))
        cached.commit()
        assert (got_TV - wanted_TV).abs().max() <= 2e-4
    for name, value in tensors(
        model
    ):  # ordered as they were read; Ernie's bias has one dimension less
        stored = source.tensor(name)
        assert torch.equal(value.reshape(stored.shape), stored), name
