"""Model shape for planning; weights are neither read nor downloaded.

    qwen3-8b, random:qwen3-8b        a shape by its name (`models.presets`)
    cairn-tiny                       a model that comes in a package, as `cairn serve` knows it
    Qwen/Qwen3-8B                    the same by the name that a hub has for it, or its config.json from the hub
    ./my-model, my-model/config.json a checkpoint's folder, or its config.json
    ./my-model.gguf                  a GGUF file, of which the header is read

Reads at most one small file: config.json of a repository is fetched if it is not here, and nothing else. No torch, but
for a GGUF file, whose reader needs it.
"""

import json
from pathlib import Path
from typing import NamedTuple

import msgspec

from cairn.core.errors import ConfigError, ModelNotFound, did_you_mean
from cairn.models.families import from_hf
from cairn.models.hub import BETTER, OWN, config_of, is_packaged, resolve
from cairn.models.presets import PRESETS, preset
from cairn.models.quantized.scheme import quantization_of
from cairn.models.spec import ModelSpec
from cairn.models.vision.families import has_vision, split_config
from cairn.models.vision.spec import VisionSpec
from cairn.plan.weight_forms import WeightForm, stored_form

ENDINGS = ("-instruct", "-chat", "-base", "-it", "-hf")  # of names whose shape is the same


class Shape(NamedTuple):
    name: str  # a preset's, where it is one
    spec: ModelSpec
    stored: WeightForm | None = None  # how its checkpoint is; None: in floating point
    vision: VisionSpec | None = None  # of a model that sees


def model_shape(name: str) -> Shape:
    preset_name = _known(name)
    if preset_name is not None:
        return Shape(preset_name, preset(preset_name))
    path = resolve(name) if is_packaged(name) else Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _of_gguf(name, path)
    if (name and path.is_dir()) or path.suffix == ".json":
        return Shape(name, *_read(path / "config.json" if path.is_dir() else path))
    cached = _cached(name)
    if cached is not None:
        return Shape(name, *_read(cached))
    short = name.rpartition("/")[2].lower()
    if not _is_repository(name):
        names = (*OWN, BETTER, *PRESETS)
        every = "a folder with a config.json, a GGUF file, or one of: " + ", ".join(names)
        raise ConfigError(
            f"no model shape is called '{name}', and there is no such folder",
            hint=did_you_mean(short, names, every),
        )
    try:
        return Shape(name, *_read(config_of(name)))
    except ModelNotFound as error:
        offline = "check the name and the network, or give a folder with the model's config.json"
        raise ConfigError(
            f"no model shape is called '{name}': {error.message}",
            hint=did_you_mean(short, PRESETS, offline),
        ) from None


def _known(name: str) -> str | None:
    """The preset that a name means: with or without an owner, an ending or `random:` before it."""
    short = name.lower().removeprefix("random:")
    if short in PRESETS:
        return short
    owner, _, short = short.rpartition("/")
    if not owner or owner.startswith(".") or "/" in owner or Path(name).exists():
        return None
    for ending in ("", *ENDINGS):
        if short.endswith(ending) and short.removesuffix(ending) in PRESETS:
            return short.removesuffix(ending)
    return None


def _of_gguf(name: str, path: Path) -> Shape:
    from cairn.models.checkpoint import open_checkpoint  # loads torch

    file = open_checkpoint(path)
    return Shape(name, file.spec, WeightForm(file.stored_form().lower(), file.stored_bits()))


def _read(path: Path) -> tuple[ModelSpec, WeightForm | None, VisionSpec | None]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read the model's shape from {path}: {error}",
            hint="a checkpoint's folder with its config.json",
        ) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no object of settings", hint="a checkpoint's config.json")
    if not has_vision(config):
        return from_hf(config), stored_form(quantization_of(config)), None
    text, vision = split_config(config)
    spec = msgspec.structs.replace(from_hf(text), deep_rows=len(vision.tower.deep_layers))
    return spec, stored_form(quantization_of(text)), vision


def _is_repository(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _cached(name: str) -> Path | None:
    """A config.json that the hub's client has fetched before."""
    if not _is_repository(name):
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(path) if isinstance(path, str) else None
