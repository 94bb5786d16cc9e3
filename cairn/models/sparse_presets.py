"""Shapes of DeepSeek and gpt-oss models, as their published configs give them; `presets` lists them. No torch."""

import math
from typing import Any

import msgspec

from cairn.models.spec import Experts, Latent, ModelSpec, Rope


def deepseek_v2_lite() -> ModelSpec:
    experts = Experts(
        count=64,
        per_token=6,
        intermediate=1408,
        renormalize=False,
        shared_intermediate=2816,
        dense_layers=(0,),
    )
    return _deepseek(
        "deepseek_v2", experts, 0, 0.707, vocab=102_400, hidden=2048, layers=27, heads=16,
        kv_heads=16, intermediate=10_944, bos_id=100_000, eos_ids=(100_001,),
    )  # fmt: skip


def deepseek_v3() -> ModelSpec:
    experts = Experts(
        count=256,
        per_token=8,
        intermediate=2048,
        gate="sigmoid",
        scale=2.5,
        choice_bias=True,
        groups=8,
        top_groups=4,
        shared_intermediate=2048,
        dense_layers=(0, 1, 2),
    )
    return _deepseek(
        "deepseek_v3", experts, 1536, 1.0, vocab=129_280, hidden=7168, layers=61, heads=128,
        kv_heads=128, intermediate=18_432, bos_id=0, eos_ids=(1,),
    )  # fmt: skip


def _deepseek(
    family: str, experts: Experts, query_rank: int, mscale: float, **sizes: Any
) -> ModelSpec:
    rope = Rope(
        kind="yarn",
        factor=40.0,
        original_context=4096,
        mscale=mscale,
        mscale_all_dim=mscale,
    )
    stretched = 0.1 * mscale * math.log(40) + 1
    return ModelSpec(
        family=family,
        head_dim=192,
        context=163_840,
        mixer="latent",
        latent=Latent(rank=512, unrotated=128, rotated=64, value=128, query_rank=query_rank),
        query_scale=192**-0.5 * stretched**2,
        rope=rope,
        experts=experts,
        **sizes,
    )


def gpt_oss(layers: int, experts: int) -> ModelSpec:
    return ModelSpec(
        family="gpt_oss",
        vocab=201_088,
        hidden=2880,
        layers=layers,
        heads=64,
        kv_heads=8,
        head_dim=64,
        intermediate=2880,
        context=131_072,
        norm_eps=1e-5,
        qkv_bias=True,
        out_bias=True,
        activation="clamped_silu",
        activation_limit=7.0,
        experts=Experts(
            count=experts, per_token=4, intermediate=2880, logit_bias=True, biases=True
        ),
        sinks=True,
        windows=(128, 0) * (layers // 2),
        rope=Rope(theta=150_000.0, kind="yarn", factor=32.0, original_context=4096, truncate=False),
        bos_id=199_998,
        eos_ids=(200_002,),
    )


def tiny_deepseek() -> ModelSpec:
    """Latent attention and experts, small enough for any machine."""
    sizes = dict(vocab=512, hidden=64, layers=3, heads=4, kv_heads=4, head_dim=24, intermediate=128)
    return ModelSpec(
        family="deepseek_v2",
        **sizes,
        context=512,
        mixer="latent",
        latent=Latent(rank=32, unrotated=16, rotated=8, value=16),
        experts=Experts(8, 2, 32, renormalize=False, shared_intermediate=64, dense_layers=(0,)),
        bos_id=1,
        eos_ids=(2,),
    )


def tiny_gpt_oss() -> ModelSpec:
    """Sinks, windows, biases and experts, small enough for any machine."""
    return msgspec.structs.replace(
        gpt_oss(4, 8),
        vocab=512,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=32,
        context=512,
        experts=Experts(8, 2, 32, logit_bias=True, biases=True),
        windows=(16, 0, 16, 0),
        rope=Rope(theta=150_000.0),
        bos_id=1,
        eos_ids=(2,),
    )
