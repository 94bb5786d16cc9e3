"""How a model is sampled where a request does not say: its generation_config.json, or what is known of a small model.

    generation_config.json     temperature, top_p, top_k, min_p, repetition_penalty; "do_sample": false is greedy
                               and keeps the penalty
    a packaged small model     greedy: SmolLM2-135M says Paris to 48% of those who ask at temperature 0.6, to all at 0

Imports nothing of torch. Whether the values are in range is checked where requests are made of them.
"""

from collections.abc import Mapping
from typing import Any

from cairn.models.hub import BETTER, OWN

Defaults = dict[str, float | int]  # by the name of the field of a request
NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
PENALTIES = ("repetition_penalty",)  # which change the likeliest token as well
GREEDY: Defaults = {"temperature": 0.0}
SMALL = (BETTER, *OWN)  # models that answer best while they take the likeliest token


def sampling_defaults(model: str, generation: Mapping[str, Any]) -> Defaults:
    """Of a model by its name and its generation_config.json, which is empty where there is none."""
    defaults: Defaults = {}
    for name in NAMES:
        value = generation.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            defaults[name] = value
    if model.lower() in SMALL or generation.get("do_sample") is False:
        return {name: defaults[name] for name in PENALTIES if name in defaults} | GREEDY
    return defaults
