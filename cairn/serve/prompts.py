"""What people call a prompt, as token ids: text, ids, a dictionary that holds one of them, or a list of these.

    "Once upon a time"                         text
    [1, 450, 4996]                             token ids
    {"prompt": "..."}                          text
    {"prompt_token_ids": [1, 450]}             token ids
    ["...", [1, 2], {"prompt": "..."}]         several

Everything is checked before the first request runs, and a mistake is named with its place. The vocabulary and the
context are the engine's to check.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from cairn.core.errors import ConfigError, RequestError, did_you_mean
from cairn.serve.engine.sampling_params import LARGEST_SEED, SamplingParams

if TYPE_CHECKING:
    from cairn.models.tokenizer import Tokenizer

PromptLike = str | Sequence[int] | Mapping[str, Any]
KEYS = ("prompt", "prompt_token_ids")


class Prompt(NamedTuple):
    text: str | None  # None: it was given as ids
    token_ids: list[int]


def read_prompts(given: object, tokenizer: "Tokenizer | None", owner: str) -> list[Prompt]:
    """All prompts, in order. `owner` is the model, for messages."""
    single = isinstance(given, str | Mapping) or _is_ids(given)
    if not single and not isinstance(given, list | tuple):
        raise RequestError(
            f"prompts is {type(given).__name__}",
            hint="give text, a list of token ids, {'prompt_token_ids': [...]}, or a list of these",
        )
    each = [given] if single else list(given)  # type: ignore[call-overload]
    bare = [_bare(one, "the prompt" if single else f"prompts[{at}]") for at, one in enumerate(each)]
    texts = [one for one in bare if isinstance(one, str)]
    if texts and tokenizer is None:
        raise ConfigError(
            f"{owner} has no tokenizer, so it cannot read text",
            hint="give the prompt as token ids",
        )
    encoded = iter(tokenizer.encode_batch(texts) if tokenizer is not None and texts else [])
    return [
        Prompt(one, next(encoded)) if isinstance(one, str) else Prompt(None, one) for one in bare
    ]


def read_params(
    given: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """The parameters of each of `count` prompts."""
    if given is None:
        given = SamplingParams()
    if isinstance(given, SamplingParams):
        return [given] * count
    if not isinstance(given, list | tuple) or not all(
        isinstance(one, SamplingParams) for one in given
    ):
        raise RequestError(
            f"sampling_params is {type(given).__name__}",
            hint="give one SamplingParams, or a list with one for each prompt",
        )
    if len(given) != count:
        raise RequestError(
            f"{len(given)} sampling parameters for {count} prompts",
            hint="give one for all, or one for each",
        )
    return list(given)


def read_priorities(given: object, count: int) -> list[int]:
    """The priority of each of `count` prompts; whether they are numbers is checked with the rest of a request."""
    if not isinstance(given, list | tuple):
        return [given] * count  # type: ignore[list-item]
    if len(given) != count:
        raise RequestError(
            f"{len(given)} priorities for {count} prompts", hint="give one for all, or one for each"
        )
    return list(given)


def of_each_answer(params: SamplingParams) -> list[SamplingParams]:
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


def _is_ids(given: object) -> bool:
    """A list of numbers is one prompt; an empty list is no prompt at all."""
    if not isinstance(given, list | tuple) or not given:
        return False
    return isinstance(given[0], int)


def _bare(one: object, where: str) -> str | list[int]:
    if isinstance(one, Mapping):
        return _of_mapping(one, where)
    if isinstance(one, str):
        return one
    if isinstance(one, list | tuple) and set(map(type, one)) <= {int}:
        return list(one)
    raise RequestError(
        f"{where} is {_described(one)}", hint="a prompt is text, or a list of token ids"
    )


def _of_mapping(given: Mapping[str, Any], where: str) -> str | list[int]:
    for key in given:
        if key not in KEYS:
            hint = did_you_mean(str(key), KEYS, otherwise=f"there are: {', '.join(KEYS)}")
            raise RequestError(f"{where} has an unknown key {key!r}", hint=hint)
    if len(given) != 1:
        raise RequestError(
            f"{where} has {len(given)} keys", hint="give either 'prompt' or 'prompt_token_ids'"
        )
    key, value = next(iter(given.items()))
    wanted, called = (str, "text") if key == "prompt" else ((list, tuple), "a list of token ids")
    if not isinstance(value, wanted):
        raise RequestError(
            f"{key} of {where} is {type(value).__name__}", hint=f"it has to be {called}"
        )
    return _bare(value, f"{key} of {where}")


def _described(one: object) -> str:
    if isinstance(one, list | tuple):
        wrong = next(item for item in one if type(item) is not int)
        return f"a list that holds {wrong!r}"
    return type(one).__name__
