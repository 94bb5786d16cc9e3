"""Sampling parameters and stop conditions of a request.

The names, meanings and defaults are those that vLLM's users know; a name that is not here is refused. Every value is
checked when the object is made, so that nothing behind this file meets a NaN, a negative count or an empty stop
string. It knows no model: what depends on the vocabulary or the context is `check_request`'s business.

    SamplingParams(temperature=0.6, top_p=0.95, max_tokens=512, stop="\\n\\n")
"""

from collections.abc import Sized
from typing import Any, Literal

import msgspec
from msgspec import Meta

from cairn.core.errors import RequestError, did_you_mean

MOST_SEQUENCES = 1024  # n
MOST_LOGPROBS = 20  # per token; the figure that OpenAI's interface and vLLM's default agree on
MOST_STOPS = 128  # strings
MOST_STOP_TOKENS = 1024
MOST_BIASES = 4096  # they are added to the logits in each step, in which other requests wait
MOST_TOKENS = 2**31 - 1
SMALLEST_SEED, LARGEST_SEED = -(2**63), 2**63 - 1
POOLINGS = (None, "mean", "last", "cls", "max")
# The ranges of numbers, also for HTTP bodies. Its temperature ends at OpenAI's 2, which is far beyond any use.
TEMPERATURE = Meta(ge=0, le=100)
SHARE = Meta(ge=0, le=1)
SHARE_ABOVE_0 = Meta(gt=0, le=1)
PENALTY = Meta(ge=-2, le=2)
REPETITION = Meta(gt=0, le=100)
BIAS = Meta(ge=-100, le=100)
# What other engines have under names that are not here, and what does it instead.
INSTEAD = {
    "best_of": "n answers all come back; choose among them",
    "use_beam_search": "there is no beam search; n answers all come back",
    "bad_words": "logit_bias of -100 keeps a token out",
    "allowed_token_ids": "logit_bias of 100 for each of them keeps all others out",
    "truncate_prompt_tokens": "nothing is truncated: cut the prompt as you want it",
    "guided_decoding": "structured_outputs takes json, regex, choice or grammar",
}


class ByName(msgspec.StructMeta):
    """A Struct's own refusal of an unknown name does not say which there are."""

    def __call__(cls, *positional: Any, **fields: Any) -> Any:
        if positional:
            raise RequestError(
                f"{cls.__name__} was given {_shown(positional[0])} without a name",
                hint=f"write {cls.__name__}(temperature=0.6, max_tokens=64)",
            )
        names = cls.__struct_fields__
        for name in fields:
            if name not in names:
                otherwise = f"there are: {', '.join(names)}"
                hint = INSTEAD.get(name) or did_you_mean(name, names, otherwise)
                raise RequestError(f"{cls.__name__} has no argument '{name}'", hint=hint)
        return super().__call__(**fields)


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, metaclass=ByName
):
    n: int = 1  # how many answers to one prompt
    temperature: float = 1.0  # 0: always the most likely token
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None or -1: different every time
    stop: list[str] | str = []  # one string is taken as a list of one
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    max_tokens: int | None = 16  # None: what the context leaves
    min_tokens: int = 0
    logprobs: int | None = None  # how many of the most likely; 0: only the chosen token's
    prompt_logprobs: int | None = None
    pooling: Literal["mean", "last", "cls", "max"] | None = None  # the prompt as one vector
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: Any = (
        None  # a `StructuredOutputs`, or a dict with its fields; see `structured_output`
    )

    def __post_init__(self) -> None:
        _normalise(self)
        _check_numbers(self)
        _check_lengths(self)
        _check_stops(self)
        _check_logit_bias(self.logit_bias)
        _require(self.pooling in POOLINGS, "pooling", self.pooling, "mean, last, cls, max or None")
        shape = self.structured_outputs
        fine = shape is None or isinstance(shape, dict | msgspec.Struct)
        _require(fine, "structured_outputs", shape, "StructuredOutputs, or a dict of its fields")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, value, "True or False")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def whole_prompt(self) -> bool:
        """Does it need something of every token of the prompt, so that none may come from a cache?"""
        return self.prompt_logprobs is not None or self.pooling is not None


def _normalise(params: SamplingParams) -> None:
    """Normalise equivalent spellings, so that the engine handles only one."""
    stop: object = params.stop
    if stop is None or isinstance(stop, str):
        msgspec.structs.force_setattr(params, "stop", [] if stop is None else [stop])
    if params.stop_token_ids is None:
        msgspec.structs.force_setattr(params, "stop_token_ids", [])
    if params.top_k == -1:
        msgspec.structs.force_setattr(params, "top_k", 0)
    if params.seed == -1:
        msgspec.structs.force_setattr(params, "seed", None)
    elif isinstance(params.seed, int) and SMALLEST_SEED <= params.seed < 0:
        msgspec.structs.force_setattr(params, "seed", params.seed & LARGEST_SEED)


def _check_numbers(params: SamplingParams) -> None:
    _real("temperature", params.temperature, TEMPERATURE)
    _real("top_p", params.top_p, SHARE_ABOVE_0)
    kept = f"0 or -1 (all tokens), or how many to keep, at most {MOST_TOKENS}"
    _whole("top_k", params.top_k, 0, MOST_TOKENS, kept)
    _real("min_p", params.min_p, SHARE)
    _real("presence_penalty", params.presence_penalty, PENALTY)
    _real("frequency_penalty", params.frequency_penalty, PENALTY)
    _real("repetition_penalty", params.repetition_penalty, REPETITION)
    if params.seed is not None:
        _whole("seed", params.seed, SMALLEST_SEED, LARGEST_SEED)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None:
            _whole(name, value, 0, MOST_LOGPROBS)


def _check_lengths(params: SamplingParams) -> None:
    _whole("n", params.n, 1, MOST_SEQUENCES)
    _whole("min_tokens", params.min_tokens, 0, MOST_TOKENS)
    if params.max_tokens is None:
        return
    rule = f"at least 1 and at most {MOST_TOKENS}, or None for what the context leaves"
    _whole("max_tokens", params.max_tokens, 1, MOST_TOKENS, rule)
    if params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens {params.min_tokens} is more than max_tokens {params.max_tokens}",
            hint="lower the one or raise the other",
        )


def _check_stops(params: SamplingParams) -> None:
    _require(isinstance(params.stop, list | tuple), "stop", params.stop, "a string or a list")
    check_count("stop", params.stop, MOST_STOPS)  # each is looked for in the text of each token
    for text in params.stop:
        _require(isinstance(text, str) and text != "", "stop", text, "a string that is not empty")
    ids = params.stop_token_ids
    _require(isinstance(ids, list | tuple), "stop_token_ids", ids, "a list of token ids")
    check_count("stop_token_ids", ids, MOST_STOP_TOKENS)
    for token in ids:
        _whole("a token of stop_token_ids", token, 0, MOST_TOKENS)


def _check_logit_bias(bias: dict[int, float] | None) -> None:
    if bias is None:
        return
    _require(isinstance(bias, dict), "logit_bias", bias, "a map from token id to bias")
    check_count("logit_bias", bias, MOST_BIASES)
    for token, value in bias.items():
        _whole("a token of logit_bias", token, 0, MOST_TOKENS)
        _real(f"logit_bias of token {token}", value, BIAS)


def check_count(name: str, entries: Sized, most: int) -> None:
    """Check the number of entries before any is examined."""
    if len(entries) > most:
        raise RequestError(f"{name} has {len(entries)} entries", hint=f"it can have {most}")


def _real(name: str, value: object, allowed: Meta) -> None:
    open_low = allowed.gt is not None
    low, high = (allowed.gt if open_low else allowed.ge) or 0, allowed.le or 0
    above = f"above {low} and at most {high}" if open_low else f"between {low} and {high}"
    # A NaN fails the comparison, infinity the upper bound.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fine = is_number and (low < value if open_low else low <= value) and value <= high
    _require(fine, name, value, above)


def _whole(name: str, value: object, low: int, high: int, expected: str | None = None) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    fine = is_whole and low <= value <= high
    _require(fine, name, value, expected or f"a whole number between {low} and {high}")


def _require(fine: bool, name: str, value: object, expected: str) -> None:
    if fine:
        return
    raise RequestError(f"{name} is {_shown(value)}", hint=f"it has to be {expected}")


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of thousands of digits
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}..."
