"""Shapes of sequence mixers for planning: weights, FLOPs and cache planes.

    MIXERS[spec.mixer]   shape: counts over a `ModelSpec`, without torch
                         module: the `Sublayer` that computes it, loaded when a model is built

`ModelSpec` asks the shape for its counts and `models.cache` for its planes; the planner, the page pool and the
simulator ask those. A new mixer is a module with its two forms, its shape, and a line in MIXERS.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from cairn.core.errors import ConfigError
from cairn.kernels.paged.latent_layout import RowLayout

if TYPE_CHECKING:
    from cairn.models.spec import DeltaSizes, Latent, ModelSpec, ShortConvSizes


class Plane(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named cache plane of a layer, per token or per sequence."""

    name: str
    heads: int
    width: int
    value_bytes: float | None = None  # of its own type, as scales have; None: of the cache's type
    beside_float8: int = 0  # more bytes of a token in a float8 cache: scales, columns in 16 bits

    def token_bytes(self, value_bytes: float) -> float:
        own = value_bytes if self.value_bytes is None else self.value_bytes
        return self.heads * self.width * own + self.beside_float8 * (value_bytes == 1)


class MixerShape(Protocol):
    """Counts of one layer."""

    def parameters(self, spec: "ModelSpec") -> int: ...

    def matmul_parameters(self, spec: "ModelSpec") -> int:
        """Number of parameters in matmuls of a token."""
        ...

    def pair_flops(self, spec: "ModelSpec") -> int:
        """FLOPs for each token and each earlier one that it sees."""
        ...

    def planes(self, spec: "ModelSpec", shards: int) -> tuple[Plane, ...]:
        """Cache planes on one tensor-parallel rank."""
        ...

    def token_flops(self, spec: "ModelSpec") -> int:
        """FLOPs for each token besides products with weights: of a state, which is as large for any length."""
        ...


class GroupedQuery:
    """q, k, v and out; every head of a group reads the same keys and values."""

    def parameters(self, spec: "ModelSpec") -> int:
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        biases = (queries + 2 * keys) * spec.qkv_bias + spec.hidden * spec.out_bias
        biases += queries * (spec.qkv_bias and spec.output_gate) + spec.heads * spec.sinks
        normed = queries + keys if spec.qk_norm_over == "width" else 2 * spec.head_dim
        per_column = 2 if spec.norm == "layer" else 1
        return self.matmul_parameters(spec) + biases + normed * per_column * spec.qk_norm

    def matmul_parameters(self, spec: "ModelSpec") -> int:
        projected = (2 + spec.output_gate) * spec.heads + 2 * spec.kv_heads
        return spec.hidden * spec.head_dim * projected

    def pair_flops(self, spec: "ModelSpec") -> int:
        return 4 * spec.heads * spec.head_dim  # q @ k and p @ v

    def planes(self, spec: "ModelSpec", shards: int) -> tuple[Plane, ...]:
        heads = max(1, spec.kv_heads // shards)
        return Plane("k", heads, spec.head_dim), Plane("v", heads, spec.head_dim)

    def token_flops(self, spec: "ModelSpec") -> int:
        return 0


class LatentShape:
    """Latent attention: one row per token is cached, whatever the number of heads and ranks."""

    def parameters(self, spec: "ModelSpec") -> int:
        latent = _latent(spec)
        norms = latent.rank + latent.query_rank
        biases = (latent.query_rank + latent.width) * spec.qkv_bias + spec.hidden * spec.out_bias
        return self.matmul_parameters(spec) + norms + biases

    def matmul_parameters(self, spec: "ModelSpec") -> int:
        latent, queries = _latent(spec), spec.heads * spec.head_dim
        if latent.query_rank:
            query = latent.query_rank * (spec.hidden + queries)
        else:
            query = spec.hidden * queries
        expansion = latent.rank * spec.heads * (latent.unrotated + latent.value)
        out = spec.heads * latent.value * spec.hidden
        return query + spec.hidden * latent.width + expansion + out

    def pair_flops(self, spec: "ModelSpec") -> int:
        """FLOPs per (query, key) pair in the expanded form, which prefill and training use."""
        return 2 * spec.heads * (spec.head_dim + _latent(spec).value)

    def planes(self, spec: "ModelSpec", shards: int) -> tuple[Plane, ...]:
        latent = _latent(spec)
        row = RowLayout(latent.rank, latent.rotated, float8=True)
        return (Plane("latent", 1, latent.width, beside_float8=row.columns - latent.width),)

    def token_flops(self, spec: "ModelSpec") -> int:
        return 0


class DeltaShape:
    """A gated delta net: the last inputs of its convolution, and a matrix for each head in float32."""

    def parameters(self, spec: "ModelSpec") -> int:
        sizes = _delta(spec)
        convolution = (2 * sizes.keys + sizes.values) * sizes.kernel
        rest = convolution + 2 * sizes.value_heads + sizes.value_width
        return self.matmul_parameters(spec) + rest

    def matmul_parameters(self, spec: "ModelSpec") -> int:
        sizes = _delta(spec)
        return spec.hidden * (2 * sizes.keys + 3 * sizes.values + 2 * sizes.value_heads)

    def pair_flops(self, spec: "ModelSpec") -> int:
        return 0

    def planes(self, spec: "ModelSpec", shards: int) -> tuple[Plane, ...]:
        sizes = _delta(spec)
        last = Plane("convolution", sizes.kernel - 1, (2 * sizes.keys + sizes.values) // shards)
        matrices = sizes.value_heads // shards * sizes.key_width
        return last, Plane("recurrent", matrices, sizes.value_width, value_bytes=4)

    def token_flops(self, spec: "ModelSpec") -> int:
        sizes = _delta(spec)
        return 6 * sizes.key_width * sizes.values  # S^T k, k v^T and S^T q of every head


class ShortConvShape:
    """A convolution over the last few tokens, of which it keeps all but one."""

    def parameters(self, spec: "ModelSpec") -> int:
        sizes = _short_conv(spec)
        biases = 5 * spec.hidden * sizes.bias
        return self.matmul_parameters(spec) + spec.hidden * sizes.kernel + biases

    def matmul_parameters(self, spec: "ModelSpec") -> int:
        return 4 * spec.hidden**2

    def pair_flops(self, spec: "ModelSpec") -> int:
        return 0

    def planes(self, spec: "ModelSpec", shards: int) -> tuple[Plane, ...]:
        return (Plane("convolution", _short_conv(spec).kernel - 1, spec.hidden // shards),)

    def token_flops(self, spec: "ModelSpec") -> int:
        return 2 * spec.hidden * _short_conv(spec).kernel


def _delta(spec: "ModelSpec") -> "DeltaSizes":
    if spec.delta is None:
        raise ConfigError(f"a {spec.family} model with a delta net has no sizes for it")
    return spec.delta


def _short_conv(spec: "ModelSpec") -> "ShortConvSizes":
    if spec.short_conv is None:
        raise ConfigError(f"a {spec.family} model with a short convolution has no sizes for it")
    return spec.short_conv


def _latent(spec: "ModelSpec") -> "Latent":
    if spec.latent is None:
        raise ConfigError(
            f"a {spec.family} model with mixer latent has no latent sizes",
            hint="give `latent`: rank, unrotated, rotated and value",
        )
    return spec.latent


class MixerRegistration(NamedTuple):
    shape: MixerShape
    module: str
    name: str  # of the class
    state: bool = False  # it keeps a state of each sequence instead of something of each token


MIXERS = {
    "attention": MixerRegistration(GroupedQuery(), "cairn.models.attention", "Attention"),
    "latent": MixerRegistration(LatentShape(), "cairn.models.latent", "LatentAttention"),
    "delta": MixerRegistration(DeltaShape(), "cairn.models.delta_net", "DeltaNet", state=True),
    "short_conv": MixerRegistration(
        ShortConvShape(), "cairn.models.short_conv", "ShortConv", state=True
    ),
}


def make_mixer(name: str, *arguments: Any) -> Any:
    """The module of a registered mixer."""
    registration = MIXERS[name]
    return getattr(import_module(registration.module), registration.name)(*arguments)
