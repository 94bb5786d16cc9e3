"""The shapes of models people run, by name, without a file to read.

    spec = preset("qwen3-8b")

For planning, for random weights, and for tests. The numbers are those of the published configs; a test
holds each family against `transformers`. No torch.
"""

from collections.abc import Callable
from typing import Any

import msgspec

from cairn.core.errors import ConfigError, did_you_mean
from cairn.models.described_presets import glm45_air, glm45_whole, olmo3, phi4, smollm3
from cairn.models.recurrent_presets import lfm2_1_2b, qwen3_next_80b, tiny_qwen3_next
from cairn.models.sparse_presets import (
    deepseek_v2_lite,
    deepseek_v3,
    gpt_oss,
    tiny_deepseek,
    tiny_gpt_oss,
)
from cairn.models.spec import Experts, ModelSpec, Rope


def preset(name: str) -> ModelSpec:
    build = PRESETS.get(name.lower())
    if build is None:
        hint = did_you_mean(name.lower(), PRESETS, f"one of: {', '.join(PRESETS)}")
        raise ConfigError(f"no model shape is called {name!r}", hint=hint)
    return build()


def with_layers(spec: ModelSpec, layers: int) -> ModelSpec:
    """The same with another number of layers: what differs from layer to layer is cut, or goes on as it began."""
    experts = spec.experts
    if experts is not None and experts.dense_layers:
        dense = tuple(layer for layer in experts.dense_layers if layer < layers)
        experts = msgspec.structs.replace(experts, dense_layers=dense)
    nope = _continued(tuple(layer in spec.nope_layers for layer in range(spec.layers)), layers)
    return msgspec.structs.replace(
        spec,
        layers=layers,
        windows=_continued(spec.windows, layers),
        mixers=_continued(spec.mixers, layers),
        nope_layers=tuple(layer for layer, without in enumerate(nope) if without),
        experts=experts,
    )


def _continued(pattern: tuple[Any, ...], layers: int) -> tuple[Any, ...]:
    """Continue a per-layer pattern by its shortest period, for example five windowed layers and one full."""
    count = len(pattern)
    period = next((p for p in range(1, count) if pattern[p:] == pattern[:-p]), count)
    return tuple(pattern[layer % period] for layer in range(layers)) if pattern else ()


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, **rest: Any) -> ModelSpec:
    fields: dict[str, Any] = dict(
        family="qwen3", vocab=151_936, hidden=hidden, layers=layers, heads=heads, kv_heads=8,
        head_dim=128, intermediate=intermediate, context=40_960, qk_norm=True,
        rope=Rope(theta=1_000_000.0), bos_id=151_643, eos_ids=(151_645,),
    )  # fmt: skip
    return ModelSpec(**(fields | rest))


def _qwen2(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, **rest: Any
) -> ModelSpec:
    fields: dict[str, Any] = dict(
        family="qwen2", vocab=152_064, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads,
        head_dim=128, intermediate=intermediate, context=32_768, qkv_bias=True,
        rope=Rope(theta=1_000_000.0), bos_id=151_643, eos_ids=(151_645,),
    )  # fmt: skip
    return ModelSpec(**(fields | rest))


def _llama3(hidden: int, layers: int, heads: int, intermediate: int, **rest: Any) -> ModelSpec:
    fields: dict[str, Any] = dict(
        family="llama", vocab=128_256, hidden=hidden, layers=layers, heads=heads, kv_heads=8,
        head_dim=128, intermediate=intermediate, context=131_072, norm_eps=1e-5,
        rope=_llama3_rope(8.0), bos_id=128_000, eos_ids=(128_001, 128_008, 128_009),
    )  # fmt: skip
    return ModelSpec(**(fields | rest))


def _llama2(hidden: int, layers: int, heads: int, intermediate: int, **rest: Any) -> ModelSpec:
    """Llama 2, and the first Llama, whose context is 2,048 tokens."""
    fields: dict[str, Any] = dict(
        family="llama", vocab=32_000, hidden=hidden, layers=layers, heads=heads, kv_heads=heads,
        head_dim=hidden // heads, intermediate=intermediate, context=4096, norm_eps=1e-5,
        bos_id=1, eos_ids=(2,),
    )  # fmt: skip
    return ModelSpec(**(fields | rest))


def _llama3_rope(factor: float) -> Rope:
    return Rope(theta=500_000.0, kind="llama3", factor=factor, original_context=8192)


def _mistral(vocab: int, theta: float, **rest: Any) -> ModelSpec:
    fields: dict[str, Any] = dict(
        family="mistral", vocab=vocab, hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128,
        intermediate=14_336, context=32_768, norm_eps=1e-5, rope=Rope(theta=theta), bos_id=1,
        eos_ids=(2,),
    )  # fmt: skip
    return ModelSpec(**(fields | rest))


def _mixtral(hidden: int, layers: int, heads: int, intermediate: int, **rest: Any) -> ModelSpec:
    fields: dict[str, Any] = dict(
        family="mixtral", vocab=32_000, hidden=hidden, layers=layers, heads=heads, kv_heads=8,
        head_dim=128, intermediate=intermediate, context=32_768, norm_eps=1e-5,
        rope=Rope(theta=1_000_000.0), bos_id=1, eos_ids=(2,),
        experts=Experts(count=8, per_token=2, intermediate=intermediate),
    )  # fmt: skip
    return ModelSpec(**(fields | rest))


def _gemma3(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, **rest: Any
) -> ModelSpec:
    """Every sixth layer sees everything; `window`: what the others see."""
    window = rest.pop("window", 1024)
    fields: dict[str, Any] = {
        "family": "gemma3",
        "vocab": 262_208,
        "hidden": hidden,
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": 256,
        "intermediate": intermediate,
        "context": 131_072,
        "tied": True,
        "norm_plus_one": True,
        "post_norms": True,
        "qk_norm": True,
        "activation": "gelu_tanh",
        "embedding_scale": hidden**0.5,
        "rope": Rope(theta=1_000_000.0, kind="linear", factor=8.0),
        "rope_local": Rope(),
        "windows": tuple(window if (layer + 1) % 6 else 0 for layer in range(layers)),
        "bos_id": 2,
        "eos_ids": (1, 106),
    }
    return ModelSpec(**(fields | rest))


def _gpt2(hidden: int, layers: int, heads: int) -> ModelSpec:
    return ModelSpec(
        family="gpt2", vocab=50_257, hidden=hidden, layers=layers, heads=heads, kv_heads=heads,
        head_dim=64, intermediate=4 * hidden, context=1024, tied=True, norm="layer", norm_eps=1e-5,
        qkv_bias=True, out_bias=True, mlp_bias=True, activation="gelu_tanh", gated=False,
        positions="learned", bos_id=50_256, eos_ids=(50_256,),
    )  # fmt: skip


def _tiny(family: str, **rest: Any) -> ModelSpec:
    """Shapes for tests: odd enough to catch a swapped dimension, small enough for a laptop."""
    fields: dict[str, Any] = dict(
        family=family, vocab=160, hidden=48, layers=3, heads=4, kv_heads=2, head_dim=16,
        intermediate=80, context=256, norm_eps=1e-5, bos_id=1, eos_ids=(2,),
    )  # fmt: skip
    return ModelSpec(**(fields | rest))


GEMMA_SMALL: dict[str, Any] = {
    "vocab": 262_144,
    "window": 512,
    "context": 32_768,
    "rope": Rope(theta=1_000_000.0),
}
PRESETS: dict[str, Callable[[], ModelSpec]] = {
    "qwen3-0.6b": lambda: _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": lambda: _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": lambda: _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": lambda: _qwen3(4096, 36, 32, 12_288),
    "qwen3-14b": lambda: _qwen3(5120, 40, 40, 17_408),
    "qwen3-32b": lambda: _qwen3(5120, 64, 64, 25_600),
    "qwen3-30b-a3b": lambda: _qwen3(
        2048, 48, 32, 6144, family="qwen3_moe", kv_heads=4,
        experts=Experts(count=128, per_token=8, intermediate=768),
    ),
    # To train on one card: the layers of the one above, 6 of 48.
    "qwen3-30b-a3b-6-layers": lambda: _qwen3(
        2048, 6, 32, 6144, family="qwen3_moe", kv_heads=4,
        experts=Experts(count=128, per_token=8, intermediate=768),
    ),
    "qwen2.5-0.5b": lambda: _qwen2(896, 24, 14, 2, 4864, vocab=151_936, head_dim=64, tied=True),
    "qwen2.5-1.5b": lambda: _qwen2(1536, 28, 12, 2, 8960, vocab=151_936, tied=True),
    "qwen2.5-3b": lambda: _qwen2(2048, 36, 16, 2, 11_008, vocab=151_936, tied=True),
    "qwen2.5-7b": lambda: _qwen2(3584, 28, 28, 4, 18_944),
    "qwen2.5-14b": lambda: _qwen2(5120, 48, 40, 8, 13_824),
    "qwen2.5-32b": lambda: _qwen2(5120, 64, 40, 8, 27_648),
    "qwen2.5-72b": lambda: _qwen2(8192, 80, 64, 8, 29_568),
    "tinyllama-1.1b": lambda: _llama2(2048, 22, 32, 5632, kv_heads=4, context=2048),
    "llama-65b": lambda: _llama2(8192, 80, 64, 22_016, context=2048),
    "llama-2-7b": lambda: _llama2(4096, 32, 32, 11_008),
    "llama-2-13b": lambda: _llama2(5120, 40, 40, 13_824),
    "llama-2-70b": lambda: _llama2(8192, 80, 64, 28_672, kv_heads=8),
    "llama-3.2-1b": lambda: _llama3(
        2048, 16, 32, 8192, head_dim=64, tied=True, rope=_llama3_rope(32.0)
    ),
    "llama-3.2-3b": lambda: _llama3(3072, 28, 24, 8192, tied=True, rope=_llama3_rope(32.0)),
    "llama-3.1-8b": lambda: _llama3(4096, 32, 32, 14_336),
    "llama-3.1-70b": lambda: _llama3(8192, 80, 64, 28_672),
    "llama-3.3-70b": lambda: _llama3(8192, 80, 64, 28_672),
    "mistral-7b-v0.1": lambda: _mistral(32_000, 10_000.0, windows=(4096,) * 32),
    "mistral-7b-v0.3": lambda: _mistral(32_768, 1_000_000.0),
    "mistral-nemo-12b": lambda: _mistral(
        131_072, 1_000_000.0, hidden=5120, layers=40, context=131_072
    ),
    "mixtral-8x7b": lambda: _mixtral(4096, 32, 32, 14_336),
    "mixtral-8x22b": lambda: _mixtral(6144, 56, 48, 16_384, vocab=32_768, context=65_536),
    "gemma-3-270m": lambda: _gemma3(640, 18, 4, 1, 2048, **GEMMA_SMALL),
    "gemma-3-1b": lambda: _gemma3(1152, 26, 4, 1, 6912, **GEMMA_SMALL),
    "gemma-3-4b": lambda: _gemma3(2560, 34, 8, 4, 10_240),
    "gemma-3-12b": lambda: _gemma3(3840, 48, 16, 8, 15_360),
    "gemma-3-27b": lambda: _gemma3(5376, 62, 32, 16, 21_504, head_dim=128, query_scale=168**-0.5),
    "qwen3-235b-a22b": lambda: _qwen3(
        4096, 94, 64, 12_288, family="qwen3_moe", kv_heads=4,
        experts=Experts(count=128, per_token=8, intermediate=1536),
    ),
    "llama-3.1-405b": lambda: _llama3(16_384, 126, 128, 53_248),
    "phi-4": phi4,
    "smollm3-3b": smollm3,
    "olmo-3-7b": lambda: olmo3(4096, 32, 32, 32, 11_008),
    "olmo-3-32b": lambda: olmo3(5120, 64, 40, 8, 27_648),
    "glm-4.5-air": glm45_air,
    "glm-4.5": glm45_whole,
    "deepseek-v2-lite": deepseek_v2_lite,
    "deepseek-v3": deepseek_v3,
    "gpt-oss-20b": lambda: gpt_oss(24, 32),
    "gpt-oss-120b": lambda: gpt_oss(36, 128),
    "gpt2": lambda: _gpt2(768, 12, 12),
    "gpt2-medium": lambda: _gpt2(1024, 24, 16),
    "gpt2-large": lambda: _gpt2(1280, 36, 20),
    "gpt2-xl": lambda: _gpt2(1600, 48, 25),
    # Small enough to measure on a laptop, long and wide enough for the requests of `bench.workload`.
    "tiny": lambda: _qwen3(
        128, 4, 4, 384, kv_heads=2, head_dim=32, vocab=10_240, context=4096, tied=True,
        bos_id=None, eos_ids=(),
    ),
    "qwen3-next-80b-a3b": qwen3_next_80b,
    "lfm2-1.2b": lfm2_1_2b,
    "tiny-llama": lambda: _tiny("llama"),
    "tiny-qwen3": lambda: _tiny("qwen3", qk_norm=True, tied=True, norm_eps=1e-6),
    "tiny-moe": lambda: _tiny(
        "qwen3_moe", qk_norm=True, experts=Experts(count=6, per_token=2, intermediate=24)
    ),
    "small-moe": lambda: _tiny(
        "qwen3_moe", hidden=128, layers=4, head_dim=32, intermediate=256, context=256,
        qk_norm=True, experts=Experts(count=8, per_token=2, intermediate=128),
    ),
    "tiny-gemma3": lambda: _tiny(
        "gemma3", qk_norm=True, tied=True, norm_plus_one=True, post_norms=True,
        activation="gelu_tanh", embedding_scale=48**0.5, windows=(8, 8, 0),
        rope=Rope(theta=1_000_000.0), rope_local=Rope(),
    ),
    "tiny-deepseek": tiny_deepseek,
    "tiny-gpt-oss": tiny_gpt_oss,
    "tiny-qwen3-next": tiny_qwen3_next,
    "tiny-gpt2": lambda: _tiny(
        "gpt2", kv_heads=4, hidden=64, intermediate=256, tied=True, norm="layer", qkv_bias=True,
        out_bias=True, mlp_bias=True, activation="gelu_tanh", gated=False, positions="learned",
    ),
}  # fmt: skip
