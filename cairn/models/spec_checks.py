"""Consistency checks of a model shape, run when a `ModelSpec` is created."""

import math
from typing import TYPE_CHECKING

from cairn.core.errors import ConfigError
from cairn.models.mixer import MIXERS

if TYPE_CHECKING:
    from cairn.models.spec import Experts, ModelSpec, Rope

SIZES = ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "context")


def check_spec(spec: "ModelSpec") -> None:
    """A ConfigError says what contradicts what, with the values."""
    _check_mixers(spec)
    _check_sizes(spec)
    for rope in (spec.rope, spec.rope_local or spec.rope):
        _check_rope(rope, spec.rotary_dim)
    _check_scales(spec)
    _check_windows(spec)
    if spec.experts:
        _check_experts(spec.experts)


def _check_sizes(spec: "ModelSpec") -> None:
    sizes = {name: getattr(spec, name) for name in SIZES}
    if spec.experts:
        sizes["width of an expert"] = spec.experts.intermediate
    for name, value in sizes.items():
        if value < 1:
            raise ConfigError(
                f"{name} is {value} in a {spec.family} model",
                hint="every size of a model is at least 1",
            )
    if spec.heads % spec.kv_heads:
        raise ConfigError(
            f"{spec.heads} attention heads cannot share {spec.kv_heads} key/value heads evenly",
            hint="the number of heads is a multiple of the number of key/value heads",
        )
    if spec.positions == "rope" and spec.rotary_dim % 2:
        raise ConfigError(
            f"rotary positions need an even head size, not {spec.rotary_dim}",
            hint="rotation turns pairs of dimensions",
        )


def _check_scales(spec: "ModelSpec") -> None:
    if spec.residual_scale != 1.0 and spec.post_norms:
        raise ConfigError(
            "a model that norms what its blocks add and scales it too", hint="no known family does"
        )
    if spec.qk_norm_rotated and spec.qk_norm_over == "width":
        raise ConfigError(
            "norms of q and k over all heads behind the rotation", hint="no known family has them"
        )
    if not (0 < spec.logit_divisor < math.inf and abs(spec.residual_scale) < math.inf):
        raise ConfigError(
            f"logits divided by {spec.logit_divisor}, residuals scaled by {spec.residual_scale}",
            hint="both are finite numbers, and the divisor is above 0",
        )


def _check_windows(spec: "ModelSpec") -> None:
    if spec.windows and len(spec.windows) != spec.layers:
        raise ConfigError(
            f"{len(spec.windows)} windows for {spec.layers} layers", hint="give one per layer"
        )
    if min(spec.windows, default=0) < 0:
        raise ConfigError(
            f"a layer has window {min(spec.windows)}",
            hint="it is how many tokens back the layer sees; 0 sees everything",
        )


def _check_mixers(spec: "ModelSpec") -> None:
    for mixer in (spec.mixer, *spec.mixers):
        if mixer not in MIXERS:
            raise ConfigError(f"mixer is {mixer}", hint=f"there is {', '.join(MIXERS)}")
    if (spec.mixer == "latent") != (spec.latent is not None):
        raise ConfigError(
            f"mixer {spec.mixer} with latent sizes {spec.latent}",
            hint="the mixer `latent` has sizes of its own, and no other one has",
        )
    if spec.mixers and len(spec.mixers) != spec.layers:
        raise ConfigError(
            f"{len(spec.mixers)} mixers for {spec.layers} layers", hint="give one per layer"
        )
    if spec.layers > 0 and not spec.token_layers:
        raise ConfigError(
            f"no layer of this {spec.family} model attends", hint="at least one layer has to"
        )
    if spec.delta is not None and spec.delta.value_heads % spec.delta.key_heads:
        raise ConfigError(
            f"{spec.delta.value_heads} heads of values cannot share {spec.delta.key_heads} heads of keys",
            hint="the number of value heads is a multiple of the number of key heads",
        )


def _check_experts(experts: "Experts") -> None:
    if not 1 <= experts.per_token <= experts.count:
        raise ConfigError(
            f"{experts.per_token} of {experts.count} experts per token",
            hint="a token visits between one and all of the experts",
        )
    groups, top = experts.groups, experts.top_groups
    fits = 1 <= top <= groups and experts.count % groups == 0
    if not fits or experts.per_token > experts.count // groups * top:
        raise ConfigError(
            f"{experts.per_token} experts per token from {top} of {groups} groups of {experts.count} experts",
            hint="groups have equally many experts, and the chosen ones have enough of them",
        )


def _check_rope(rope: "Rope", head_dim: int) -> None:
    if not (0 < rope.theta < math.inf and 0 < rope.factor < math.inf):
        raise ConfigError(
            f"rotary positions with theta {rope.theta} and factor {rope.factor}",
            hint="both are above 0",
        )
    if rope.rotated % 2 or not 0 <= rope.rotated <= head_dim:
        raise ConfigError(
            f"{rope.rotated} of {head_dim} columns of a head are rotated",
            hint="an even number of them, of which there are enough",
        )
    pairs = (rope.rotated or head_dim) // 2
    if rope.sections and (len(rope.sections) != 3 or sum(rope.sections) != pairs):
        raise ConfigError(
            f"rotary sections {list(rope.sections)} for {pairs} pairs of columns",
            hint="three counts, of frames, rows and columns, that add up to the pairs",
        )
    if rope.kind != "longrope":
        return
    for factors in (rope.short_factors, rope.long_factors):
        if len(factors) != pairs or min(factors) <= 0:
            raise ConfigError(
                f"longrope with {len(factors)} factors for {pairs} pairs of columns",
                hint="short_factor and long_factor have one number above 0 for each pair",
            )
    if rope.original_context < 2:
        raise ConfigError(
            f"longrope of a model trained with {rope.original_context} tokens",
            hint="original_max_position_embeddings is above 1",
        )
