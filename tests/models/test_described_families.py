"""Families that differ from Llama in a few fields compute what `transformers` computes, and are written back for it."""

import functools
import warnings

import pytest
import tiny_checkpoints
import torch
import transformers

from cairn.models.attend import Cached, KVCache, Packed
from cairn.models.checkpoint import open_checkpoint
from cairn.models.export import export
from cairn.models.transformer import Transformer

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
    attend = Packed([len(tokens_T)])
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


@pytest.mark.parametrize("name", [*CONFIGS, *tiny_checkpoints.SPARSE_NAMES])
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

    found_T = greedy(model, tokens_T[:9], 40)
    best_T = reference(name)(found_T[None]).logits[0].argmax(-1)
    assert found_T[9:].tolist() == best_T[8:-1].tolist()

    export(model, tmp_path / "ours")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "ours", attn_implementation="eager"
        ).eval()
    assert torch.equal(again(tokens_T[None]).logits[0], expected_TV)
