"""RoPE scaling for contexts beyond the trained length.

    stretched(spec, 131_072) -> the same model with YaRN (arXiv:2309.00071), or with its own longrope

Without training, answers get a little worse at every length, so no context is stretched unless it is asked for. No
torch.
"""

import msgspec

from cairn.core.errors import ConfigError
from cairn.models.spec import ModelSpec


def stretched(spec: ModelSpec, context: int) -> ModelSpec:
    """The model for a context of so many tokens; one that is short enough already only gets a shorter limit."""
    if context < 1:
        raise ConfigError(f"context is {context}", hint="at least 1 token")
    if spec.rope.kind == "longrope":  # whether the long factors apply, its context decides
        return _longrope(spec, context)
    if context <= spec.context:
        return msgspec.structs.replace(spec, context=context)
    if spec.positions != "rope":
        raise ConfigError(
            f"a {spec.family} model has a table of {spec.context} positions, and no more than those",
            hint=f"use --context {spec.context} or less",
        )
    if spec.rope.kind not in ("default", "yarn"):
        raise ConfigError(
            f"the positions of this {spec.family} model are stretched already, by {spec.rope.kind}",
            hint=f"use --context {spec.context} or less",
        )
    if spec.latent:
        raise ConfigError(
            f"a {spec.family} model scales its scores by how far it is stretched",
            hint=f"use --context {spec.context} or less",
        )
    trained = spec.rope.original_context or spec.context
    rope = msgspec.structs.replace(
        spec.rope, kind="yarn", factor=context / trained, original_context=trained
    )
    return msgspec.structs.replace(spec, context=context, rope=rope)


def _longrope(spec: ModelSpec, context: int) -> ModelSpec:
    if context > spec.context:
        raise ConfigError(
            f"the factors of this {spec.family} model are for {spec.context} tokens",
            hint=f"use --context {spec.context} or less",
        )
    return msgspec.structs.replace(spec, context=context)
