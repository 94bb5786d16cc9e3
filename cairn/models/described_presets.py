"""Shapes of further published models, among them those that no single GPU holds; `presets` lists them. No torch."""

from cairn.models.spec import Experts, ModelSpec, Rope


def phi4() -> ModelSpec:
    return ModelSpec(
        family="phi3",
        vocab=100_352,
        hidden=5120,
        layers=40,
        heads=40,
        kv_heads=10,
        head_dim=128,
        intermediate=17_920,
        context=16_384,
        norm_eps=1e-5,
        rope=Rope(theta=250_000.0),
        bos_id=100_257,
        eos_ids=(100_265,),
    )


def smollm3() -> ModelSpec:
    return ModelSpec(
        family="smollm3",
        vocab=128_256,
        hidden=2048,
        layers=36,
        heads=16,
        kv_heads=4,
        head_dim=128,
        intermediate=11_008,
        context=65_536,
        tied=True,
        rope=Rope(theta=5_000_000.0),
        nope_layers=tuple(range(3, 36, 4)),
        bos_id=128_000,
        eos_ids=(128_012,),
    )


def olmo3(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> ModelSpec:
    theta = 500_000.0
    return ModelSpec(
        family="olmo3",
        vocab=100_278,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        intermediate=intermediate,
        context=65_536,
        pre_norms=False,
        post_norms=True,
        qk_norm=True,
        qk_norm_over="width",
        windows=(4096, 4096, 4096, 0) * (layers // 4),
        rope=Rope(theta=theta, kind="yarn", factor=8.0, original_context=8192),
        rope_local=Rope(theta=theta),
        eos_ids=(100_257,),
    )


def glm45(hidden: int, layers: int, intermediate: int, dense: int, experts: Experts) -> ModelSpec:
    """GLM-4.5 preset without its MTP layer."""
    return ModelSpec(
        family="glm4_moe",
        vocab=151_552,
        hidden=hidden,
        layers=layers,
        heads=96,
        kv_heads=8,
        head_dim=128,
        intermediate=intermediate,
        context=131_072,
        norm_eps=1e-5,
        qkv_bias=True,
        qk_norm=dense > 1,
        rope=Rope(theta=1_000_000.0, rotated=64),
        experts=experts,
        eos_ids=(151_329, 151_336, 151_338),
    )


def glm45_air() -> ModelSpec:
    return glm45(4096, 46, 10_944, 1, _experts(128, 1408, 1))


def glm45_whole() -> ModelSpec:
    return glm45(5120, 92, 12_288, 3, _experts(160, 1536, 3, scale=2.5))


def _experts(count: int, intermediate: int, dense: int, scale: float = 1.0) -> Experts:
    return Experts(
        count=count,
        per_token=8,
        intermediate=intermediate,
        gate="sigmoid",
        scale=scale,
        choice_bias=True,
        shared_intermediate=intermediate,
        dense_layers=tuple(range(dense)),
    )
