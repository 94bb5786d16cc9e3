"""Conversion of prompts to token ids: text, ids, a dictionary with one of them, or a list of these.

    "Once upon a time"                         text
    [1, 450, 4996]                             token ids
    {"prompt": "..."}                          text
    {"prompt_token_ids": [1, 450]}             token ids; "prompt" beside them is their text, and not read
    {"prompt": "...", "cache_salt": "tenant"}  only prompts of the same salt find each other's cached pages
    ["...", [1, 2], {"prompt": "..."}]         several

Everything is checked before the first request runs, and a mistake is named with its place. The vocabulary and the
context are the engine's to check.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cairn.core.errors import ConfigError, RequestError, did_you_mean
from cairn.models.vision.picture import Picture
from cairn.serve.engine.sampling_params import LARGEST_SEED, SamplingParams

if TYPE_CHECKING:
    from cairn.models.tokenizer import Tokenizer

PromptLike = str | Sequence[int] | Mapping[str, Any]
KEYS = ("prompt", "prompt_token_ids", "cache_salt")


class Prompt(NamedTuple):
    text: str | None  # None: it was given as ids
    token_ids: list[int]
    salt: str = ""
    pictures: Sequence[Picture] = ()  # whose rows stand in place of its placeholders


class UnreadPrompt(NamedTuple):
    """A prompt before its text is read."""

    text: str | None = None
    token_ids: list[int] | None = None
    salt: str = ""


def read_prompts(prompts: object, tokenizer: "Tokenizer | None", owner: str) -> list[Prompt]:
    """All prompts, in order. `owner` is the model, for messages."""
    single = isinstance(prompts, str | Mapping) or _is_ids(prompts)
    if not single and not isinstance(prompts, list | tuple):
        raise RequestError(
            f"prompts is {type(prompts).__name__}",
            hint="give text, a list of token ids, {'prompt_token_ids': [...]}, or a list of these",
        )
    each = [prompts] if single else list(prompts)  # type: ignore[call-overload]
    bare = [_bare(one, "the prompt" if single else f"prompts[{at}]") for at, one in enumerate(each)]
    texts = [one.text for one in bare if one.token_ids is None and one.text is not None]
    if texts and tokenizer is None:
        raise ConfigError(
            f"{owner} has no tokenizer, so it cannot read text",
            hint="give the prompt as token ids",
        )
    encoded = iter(tokenizer.encode_batch(texts) if tokenizer is not None and texts else [])
    return [
        Prompt(one.text, next(encoded) if one.token_ids is None else one.token_ids, one.salt)
        for one in bare
    ]


def read_params(
    params: SamplingParams | Sequence[SamplingParams] | None,
    count: int,
    defaults: Mapping[str, Any],
) -> list[SamplingParams]:
    """The parameters of each of `count` prompts; `defaults`: of the model, where none are given."""
    if params is None:
        params = SamplingParams(**defaults)
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple) or not all(
        isinstance(one, SamplingParams) for one in params
    ):
        raise RequestError(
            f"sampling_params is {type(params).__name__}",
            hint="give one SamplingParams, or a list with one for each prompt",
        )
    if len(params) != count:
        raise RequestError(
            f"{len(params)} sampling parameters for {count} prompts",
            hint="give one for all, or one for each",
        )
    return list(params)


def read_priorities(priorities: object, count: int) -> list[int]:
    """The priority of each of `count` prompts; whether they are numbers is checked with the rest of a request."""
    if not isinstance(priorities, list | tuple):
        return [priorities] * count  # type: ignore[list-item]
    if len(priorities) != count:
        raise RequestError(
            f"{len(priorities)} priorities for {count} prompts",
            hint="give one for all, or one for each",
        )
    return list(priorities)


def params_of_answers(params: SamplingParams) -> list[SamplingParams]:
    """`n` answers are n requests, each with a seed of its own that follows from the one that was given."""
    if params.n == 1:
        return [params]
    seeds = [
        None if params.seed is None else (params.seed + at) & LARGEST_SEED for at in range(params.n)
    ]
    first = [
        msgspec.structs.replace(params, n=1, seed=seed, prompt_logprobs=None) for seed in seeds
    ]
    # Log-probabilities of the prompt are the same for all, and are computed once.
    first[0] = msgspec.structs.replace(first[0], prompt_logprobs=params.prompt_logprobs)
    return first


def _is_ids(value: object) -> bool:
    """A list of numbers is one prompt; an empty list is no prompt at all."""
    if not isinstance(value, list | tuple) or not value:
        return False
    return isinstance(value[0], int)


def _bare(one: object, where: str) -> UnreadPrompt:
    if isinstance(one, Mapping):
        return _of_mapping(one, where)
    if isinstance(one, str):
        return UnreadPrompt(text=one)
    if isinstance(one, list | tuple) and set(map(type, one)) <= {int}:
        return UnreadPrompt(token_ids=list(one))
    raise RequestError(
        f"{where} is {_described(one)}", hint="a prompt is text, or a list of token ids"
    )


def _of_mapping(prompt: Mapping[str, Any], where: str) -> UnreadPrompt:
    for key in prompt:
        if key not in KEYS:
            hint = did_you_mean(str(key), KEYS, otherwise=f"there are: {', '.join(KEYS)}")
            raise RequestError(f"{where} has an unknown key {key!r}", hint=hint)
    text, ids, salt = (prompt.get(key) for key in KEYS)
    if text is None and ids is None:
        raise RequestError(f"{where} is empty", hint="give 'prompt' or 'prompt_token_ids'")
    for key, value, kind, called in (
        ("prompt", text, str, "text"),
        ("prompt_token_ids", ids, (list, tuple), "a list of token ids"),
        ("cache_salt", salt, str, "text"),
    ):
        if value is not None and not isinstance(value, kind):
            message = f"{key} of {where} is {type(value).__name__}"
            raise RequestError(message, hint=f"it has to be {called}")
    if ids is not None:
        ids = _bare(ids, f"prompt_token_ids of {where}").token_ids
    return UnreadPrompt(text, ids, salt or "")


def _described(one: object) -> str:
    if isinstance(one, list | tuple):
        wrong = next(item for item in one if type(item) is not int)
        return f"a list that holds {wrong!r}"
    return type(one).__name__
