"""Prompts and biases of tokens in the forms that llama.cpp's server takes.

"text"   {"prompt_string": "text"}   [1, 2, 3]   [1, 2, "text", 3]        one prompt
["text", [1, 2], {"prompt_string": "text"}, [1, "text"]]                  several

{"17": -1, " the": -100}   [[17, -1], [" the", false]]     false: never; a text: each of its tokens
"""

from typing import Any

from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.server.service import LONG_TEXT, Service
from cairn.serve.prompts import Prompt

MOST_PROMPTS = 128
MOST_BIASES = 1024
NEVER = -100.0  # the lowest bias that there is
FORMS = (
    'text, {"prompt_string": text}, a list of token ids and texts, or a list of several of these'
)


async def read_prompts(service: Service, given: Any) -> list[Prompt]:
    """Read prompts in order; a list of tokens is a single prompt."""
    if not isinstance(given, list) or (given and all(isinstance(one, int) for one in given)):
        return [await _prompt(service, given, "prompt")]
    kinds = {type(one) for one in given}
    if kinds == {int, str}:
        return [await _prompt(service, given, "prompt")]
    if not given or len(given) > MOST_PROMPTS:
        message = f"prompt holds {len(given)} entries; it can have 1 to {MOST_PROMPTS}"
        raise Refusal(400, message, param="prompt")
    return [await _prompt(service, one, f"prompt[{at}]") for at, one in enumerate(given)]


async def _prompt(service: Service, given: Any, where: str) -> Prompt:
    if isinstance(given, dict):
        if given.get("multimodal_data"):
            message = f"{where}.multimodal_data is given; send pictures to /v1/chat/completions"
            raise Refusal(400, message, param="prompt", code="unsupported")
        given = given.get("prompt_string")
    if isinstance(given, str):
        service.check_length(given, "prompt")
        return Prompt(given, await service.encode(given))
    if not isinstance(given, list) or not given:
        raise Refusal(
            400, f"{where} is of no form that is known; it has to be {FORMS}", param="prompt"
        )
    context = service.serving.limits.context
    ids: list[int] = []
    for at, part in enumerate(given):
        if isinstance(part, str):
            service.check_length(part, "prompt")
            ids += await service.encode(part, special=at == 0)
        elif type(part) is int:
            ids.append(part)
        else:
            raise Refusal(400, f"{where}[{at}] is neither a token id nor text", param="prompt")
        if len(ids) > context and at + 1 < len(given):
            break  # the rest need not be read: it is refused
    return Prompt(None, ids)


def read_biases(service: Service, given: Any) -> dict[int, float] | None:
    """A bias for each token."""
    if given is None or given == [] or given == {}:
        return None
    entries = [*given.items()] if isinstance(given, dict) else given
    fine = isinstance(entries, list) and all(
        isinstance(one, list | tuple) and len(one) == 2 and _is_bias(one[1]) for one in entries
    )
    if not fine or len(entries) > MOST_BIASES:
        message = (
            f"logit_bias has to be up to {MOST_BIASES} pairs of a token and its bias, as a list or an object; "
            "a token is an id or text, a bias a number or false"
        )
        raise Refusal(400, message, param="logit_bias")
    biases: dict[int, float] = {}
    for token, bias in entries:
        value = NEVER if bias is False else min(max(float(bias), NEVER), -NEVER)
        biases |= dict.fromkeys(_tokens(service, token), value)
    return biases


def _is_bias(value: object) -> bool:
    return value is False or (isinstance(value, int | float) and value is not True)


def _tokens(service: Service, token: object) -> list[int]:
    if type(token) is int:
        return [token]
    if not isinstance(token, str) or len(token) > LONG_TEXT:
        raise Refusal(
            400, "logit_bias has a token that is neither an id nor a short text", param="logit_bias"
        )
    if token.isascii() and token.isdigit() and len(token) <= 10:
        return [int(token)]
    return service.tokenizer.encode(token, special=False)
