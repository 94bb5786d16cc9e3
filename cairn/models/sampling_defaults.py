"""Default sampling parameters of a model: from its files, or known values for a small model.

    generation_config.json     temperature, top_p, top_k, min_p, repetition_penalty; "do_sample": false is greedy
                               and keeps the penalty
    a GGUF file                its general.sampling.* over llama.cpp's own defaults: quantised weights sampled from the
                               whole vocabulary at temperature 1 are visibly worse
    a packaged small model     greedy: SmolLM2-135M says Paris to 48% of those who ask at temperature 0.6, to all at 0

Imports nothing of torch. Whether the values are in range is checked where requests are made of them.
"""

import logging
from collections.abc import Mapping
from typing import Any

from cairn.models.hub import BETTER, OWN

Defaults = dict[str, float | int]  # by the name of the field of a request
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
PENALTIES = ("repetition_penalty",)  # which change the likeliest token as well
GREEDY: Defaults = {"temperature": 0.0}
SMALL = (BETTER, *OWN)  # models that answer best while they take the likeliest token
# What llama.cpp takes where neither the request nor the file says.
LLAMA_CPP: Defaults = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_GGUF = "general.sampling."
_GGUF_NAMES = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
# Samplers that are not here, each with the value with which it changes nothing.
_GGUF_NEUTRAL = {"mirostat": 0, "xtc_probability": 0}
log = logging.getLogger("cairn")


def sampling_defaults(model: str, generation: Mapping[str, Any]) -> Defaults:
    """Defaults of a model by its name and its generation_config.json, which may be empty."""
    defaults: Defaults = {}
    for name in NAMES:
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            defaults[name] = value
    if model.lower() in SMALL or generation.get("do_sample") is False:
        return {name: defaults[name] for name in PENALTIES if name in defaults} | GREEDY
    return defaults


def gguf_generation(metadata: Mapping[str, object], source: str) -> Defaults:
    """The defaults of a GGUF file, under the names of a generation_config.json."""
    generation = dict(LLAMA_CPP)
    for key, value in metadata.items():
        name = key.removeprefix(_GGUF)
        if name == key or not isinstance(value, int | float):
            continue
        if value != _GGUF_NEUTRAL.get(name, value):
            log.warning("%s asks for %s = %s, which is not supported", source, key, value)
        if (field := _GGUF_NAMES.get(name, name)) in NAMES:
            generation[field] = float(f"{value:.7g}") if isinstance(value, float) else value
    # llama.cpp takes the likeliest token at temperatures up to 0, and all tokens at such a top_k.
    return generation | {name: max(generation[name], 0) for name in ("temperature", "top_k")}
