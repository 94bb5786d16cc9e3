"""Request features besides tokens: sampling parameters, log probabilities, structured output.

    sampled      each request has other sampling parameters than the one before it
    logprobs     the log-probabilities of the 5 likeliest tokens
    structured   an answer that follows a JSON schema; it ends where the schema lets it

Pure: fields for the body of each request, in order.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from cairn.bench.everyday import SAMPLING

Mix = Literal["none", "sampled", "logprobs", "structured"]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["person", "place", "thing"]},
        "year": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
    },
    "required": ["name", "kind", "year", "tags"],
    "additionalProperties": False,
}


def fields(mix: Mix, endpoint: str) -> Iterator[Mapping[str, Any]]:
    """Endless iterator over the fields of successive requests."""
    if mix == "sampled":
        return itertools.cycle(SAMPLING)
    if mix == "logprobs":
        asked = {"logprobs": True, "top_logprobs": 5} if endpoint == "chat" else {"logprobs": 5}
        return itertools.repeat(asked)
    if mix == "structured":
        schema = {"name": "item", "schema": SCHEMA, "strict": True}
        wanted = {"type": "json_schema", "json_schema": schema}
        return itertools.repeat({"response_format": wanted, "ignore_eos": False})
    return itertools.repeat({})
