"""Settings that a model cannot be served with; refused before its weights are loaded."""

from cairn.core.errors import ConfigError
from cairn.models.spec import ModelSpec
from cairn.models.vision.spec import VisionSpec
from cairn.serve.config import EngineConfig


def check_experts(config: EngineConfig, spec: ModelSpec) -> None:
    if config.enable_expert_parallel and (spec.experts is None or config.tensor_parallel_size == 1):
        why = "has no experts" if spec.experts is None else "runs on one rank"
        raise ConfigError(
            f"enable_expert_parallel is given, and this {spec.family} model {why}",
            hint="leave it out, or give a model with experts and tensor_parallel_size",
        )


def check_sight(vision: VisionSpec, config: EngineConfig) -> None:
    """Reject options that vision models with bidirectional attention or M-RoPE do not support."""
    if config.batch_invariant and vision.varies:
        raise ConfigError(
            f"batch_invariant is given, and pictures of a {vision.family} model are not: {vision.varies}",
            hint="leave it out",
        )
    if config.kv_cache_dtype != "auto" and vision.sees != "before":
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype}, and tokens of a picture of a {vision.family} model see each "
            "other both ways, which needs the cache in the type of the model",
            hint="leave it out",
        )
