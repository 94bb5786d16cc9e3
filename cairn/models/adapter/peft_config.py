"""`adapter_config.json` as PEFT writes it, to and from an `AdapterSpec`. Knows no tensors.

Fields that change what an adapter computes and that this code does not carry out are refused by name; all others that
are not understood (how it was initialised, which version wrote it) say nothing about the result and are ignored.
"""

from pathlib import Path
from typing import Any

from cairn.core.errors import ConfigError, UnsupportedModel
from cairn.models.adapter.spec import AdapterSpec
from cairn.models.safetensors_file import read_json

FILE = "adapter_config.json"
# Each of these changes the result when it is set.
REFUSED = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "lora_bias", "megatron_config",
    "modules_to_save", "monteclora_config", "target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora",
    "velora_config",
)  # fmt: skip
CHANGES_BASE = (
    "pissa",
    "olora",
    "corda",
    "loftq",
    "lora_ga",
)  # initialisations that rewrite the base


def read_config(folder: Path) -> tuple[AdapterSpec, str]:
    """The adapter's description, and the base model that it names (may be empty)."""
    file = folder / FILE
    if not file.is_file():
        raise ConfigError(f"no {FILE} in {folder}", hint="name the folder that PEFT or cairn wrote")
    fields = read_json(file)
    _refuse(fields, file)
    targets = fields.get("target_modules")
    if not targets or not isinstance(targets, str | list):
        raise ConfigError(f"{file} has no target_modules", hint="the file is incomplete")
    rank = fields.get("r", 8)
    if not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"{file}: r is {rank!r}", hint="a rank is a whole number, 1 or more")
    layers = fields.get("layers_to_transform")
    layers = [] if layers is None else [layers] if isinstance(layers, int) else layers
    spec = AdapterSpec(
        rank=rank,
        alpha=float(fields.get("lora_alpha", 8)),
        targets=_patterns(targets),
        exclude=_patterns(fields.get("exclude_modules") or []),
        layers=tuple(layers),
        rslora=bool(fields.get("use_rslora")),
        dora=bool(fields.get("use_dora")),
        ranks={str(k): int(v) for k, v in (fields.get("rank_pattern") or {}).items()},
        alphas={str(k): float(v) for k, v in (fields.get("alpha_pattern") or {}).items()},
    )
    return spec, str(fields.get("base_model_name_or_path") or "")


def to_peft(spec: AdapterSpec, base: str, transposed: bool) -> dict[str, Any]:
    """The fields of `adapter_config.json`. `transposed`: the base stores its matrices as [in, out] (GPT-2)."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "inference_mode": True,
        "r": spec.rank,
        "lora_alpha": spec.alpha,
        "lora_dropout": 0.0,
        "target_modules": spec.targets if isinstance(spec.targets, str) else list(spec.targets),
        "exclude_modules": _or_none(spec.exclude),
        "layers_to_transform": list(spec.layers) or None,
        "use_rslora": spec.rslora,
        "use_dora": spec.dora,
        "rank_pattern": spec.ranks,
        "alpha_pattern": spec.alphas,
        "bias": "none",
        "fan_in_fan_out": transposed,
        "init_lora_weights": True,
        "modules_to_save": None,
    }


def _refuse(fields: dict[str, Any], file: Path) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModel(
            f"{file}: peft_type is {kind!r}", hint="adapters of type LORA are read"
        )
    refused = [name for name in REFUSED if fields.get(name)]
    if fields.get("bias", "none") != "none":
        refused.append("bias")
    how = str(fields.get("init_lora_weights", True)).lower()
    if how.startswith(CHANGES_BASE):
        refused.append("init_lora_weights")
    if refused:
        named = ", ".join(f"{name} = {fields[name]!r}" for name in refused)
        raise UnsupportedModel(
            f"{file}: {named} changes what the adapter computes and is not understood here",
            hint="merge it with PEFT (merge_and_unload) and use the merged model",
        )


def _patterns(value: str | list[str]) -> tuple[str, ...] | str:
    return value if isinstance(value, str) else tuple(sorted(value))


def _or_none(patterns: tuple[str, ...] | str) -> str | list[str] | None:
    return patterns if isinstance(patterns, str) else list(patterns) or None
