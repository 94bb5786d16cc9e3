"""Shapes of models most of whose layers keep a state, as their published configs give them; `presets` lists them."""

from cairn.models.spec import DeltaSizes, Experts, ModelSpec, Rope, ShortConvSizes


def _alternating(layers: int, every: int = 4) -> tuple[str, ...]:
    return tuple("delta" if (layer + 1) % every else "attention" for layer in range(layers))


def qwen3_next_80b() -> ModelSpec:
    """Qwen3-Next-80B preset without its MTP layer."""
    return ModelSpec(
        family="qwen3_next",
        vocab=151_936,
        hidden=2048,
        layers=48,
        heads=16,
        kv_heads=2,
        head_dim=256,
        intermediate=5120,
        context=262_144,
        norm_plus_one=True,
        qk_norm=True,
        output_gate=True,
        rope=Rope(theta=10_000_000.0, rotated=64),
        mixers=_alternating(48),
        delta=DeltaSizes(key_heads=16, value_heads=32, key_width=128, value_width=128),
        experts=Experts(
            count=512, per_token=10, intermediate=512, shared_intermediate=512, shared_gate=True
        ),
        bos_id=151_643,
        eos_ids=(151_645,),
    )


def lfm2_1_2b() -> ModelSpec:
    attends = (2, 5, 8, 10, 12, 14)
    return ModelSpec(
        family="lfm2",
        vocab=65_536,
        hidden=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        head_dim=64,
        intermediate=8192,
        context=128_000,
        tied=True,
        norm_eps=1e-5,
        qk_norm=True,
        rope=Rope(theta=1_000_000.0),
        mixers=tuple("attention" if i in attends else "short_conv" for i in range(16)),
        short_conv=ShortConvSizes(kernel=3),
        bos_id=1,
        eos_ids=(7,),
    )


def tiny_qwen3_next() -> ModelSpec:
    return ModelSpec(
        family="qwen3_next",
        vocab=211,
        hidden=48,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=80,
        context=512,
        norm_plus_one=True,
        qk_norm=True,
        output_gate=True,
        rope=Rope(rotated=4),
        mixers=_alternating(4),
        delta=DeltaSizes(key_heads=2, value_heads=4, key_width=8, value_width=12),
        experts=Experts(
            count=6, per_token=2, intermediate=24, shared_intermediate=24, shared_gate=True
        ),
    )
