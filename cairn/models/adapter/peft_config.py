"""`adapter_config.json` as PEFT writes it, to and from an `AdapterSpec`. Knows no tensors.

Fields that change what an adapter computes and that this code does not carry out are refused by name; all others that
are not understood (how it was initialised, which version wrote it) say nothing about the result and are ignored.
"""

import math
from pathlib import Path
from typing import Annotated, Any

import msgspec

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


class PeftFields(msgspec.Struct, frozen=True):
    """Fields of PEFT's adapter_config.json with PEFT's names and defaults; unset fields are written as null."""

    r: Annotated[int, msgspec.Meta(ge=1)] = 8
    lora_alpha: float = 8.0
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    use_rslora: bool | None = False
    use_dora: bool | None = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    base_model_name_or_path: str | None = None


def read_config(folder: Path) -> tuple[AdapterSpec, str]:
    """The adapter's description, and the base model that it names (may be empty)."""
    file = folder / FILE
    if not file.is_file():
        raise ConfigError(f"no {FILE} in {folder}", hint="name the folder that PEFT or cairn wrote")
    fields = _fields(file)
    if not fields.target_modules:
        raise ConfigError(f"{file} has no target_modules", hint="the file is incomplete")
    layers = fields.layers_to_transform
    spec = AdapterSpec(
        rank=fields.r,
        alpha=fields.lora_alpha,
        targets=_patterns(fields.target_modules),
        exclude=_patterns(fields.exclude_modules or []),
        layers=(layers,) if isinstance(layers, int) else tuple(layers or ()),
        rslora=bool(fields.use_rslora),
        dora=bool(fields.use_dora),
        ranks=fields.rank_pattern or {},
        alphas=fields.alpha_pattern or {},
    )
    return spec, fields.base_model_name_or_path or ""


def _fields(file: Path) -> PeftFields:
    written = read_json(file)
    _refuse(written, file)
    try:
        fields = msgspec.convert(written, PeftFields)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}", hint="compare it with what PEFT writes") from None
    alphas = {"lora_alpha": fields.lora_alpha, **(fields.alpha_pattern or {})}
    for name, alpha in alphas.items():
        if not math.isfinite(alpha):
            raise ConfigError(f"{file}: {name} is {alpha}", hint="an alpha is a finite number")
    return fields


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
