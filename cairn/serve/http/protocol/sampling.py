"""The fields that chat and completion requests share, with their ranges; and what the engine makes of them.

Names and meanings are OpenAI's; those beyond (top_k, min_p, min_tokens, ignore_eos, priority, cache_salt) are vLLM's,
or llama.cpp's (repeat_penalty, n_predict, and samplers that are refused by name). null means the default: the model's
own (`serve.request_defaults`), else OpenAI's. Unknown fields are ignored, as clients of either send many.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cairn.serve.engine.sampling_params import (
    BIAS,
    INSTEAD,
    LARGEST_SEED,
    MOST_BIASES,
    MOST_LOGPROBS,
    MOST_TOKENS,
    PENALTY,
    REPETITION,
    SHARE,
    SHARE_ABOVE_0,
    SMALLEST_SEED,
    check_count,
)
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.request_defaults import with_defaults

Count = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
AtLeastOne = Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
Most = Annotated[
    int, Meta(ge=-1, le=MOST_TOKENS)
]  # tokens of an answer; -1: what the context leaves
Share = Annotated[float, SHARE]
Penalty = Annotated[float, PENALTY]
Temperature = Annotated[float, Meta(ge=0, le=2)]  # as OpenAI has it
TopLogprobs = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]
Priority = Annotated[int, Meta(ge=-(2**31), le=2**31)]  # lower runs first


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None  # one more chunk at the end, with the usage
    continuous_usage_stats: bool | None = None  # the usage so far in every chunk


class OtherSamplers(msgspec.Struct, kw_only=True):
    """Samplers of llama.cpp's that are not here: refused where they would change the answer."""

    mirostat: float | None = None
    typical_p: float | None = None
    dry_multiplier: float | None = None
    xtc_probability: float | None = None
    dynatemp_range: float | None = None
    top_n_sigma: float | None = None
    adaptive_target: float | None = None


# The value with which each changes nothing: clients send all of them.
NEUTRAL = {
    "mirostat": 0,
    "typical_p": 1,
    "dry_multiplier": 0,
    "xtc_probability": 0,
    "dynatemp_range": 0,
    "top_n_sigma": -1,
    "adaptive_target": -1,
}
OFF_BELOW_0 = ("top_n_sigma", "adaptive_target")


def check_samplers(body: OtherSamplers) -> None:
    for name, neutral in NEUTRAL.items():
        value = getattr(body, name)
        off = value is None or value == neutral or (name in OFF_BELOW_0 and value <= 0)
        if not off:
            message = f"{name} is {value:g}; this server does not have it: leave it out, or send {neutral}"
            raise Refusal(400, message, param=name, code="unsupported")


class SamplingFields(OtherSamplers, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    ledger: bool | None = None  # the answer says where its time went
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, SHARE_ABOVE_0] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MOST_TOKENS)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, REPETITION] | None = None
    repeat_penalty: Annotated[float, REPETITION] | None = None  # llama.cpp's name for it
    n_predict: Most | None = None  # llama.cpp's name for max_tokens
    seed: Annotated[int, Meta(ge=SMALLEST_SEED, le=LARGEST_SEED)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Count] | None = None
    logit_bias: dict[str, Annotated[float, BIAS]] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Priority | None = None
    cache_salt: str | None = None  # requests of different salts share no cached prefix
    # Cut a prompt to its last so many tokens; -1: to what leaves room for the answer.
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # log-probabilities name tokens token_id:17
    prompt_logprobs: TopLogprobs | None = None  # of the prompt's tokens; not in a stream
    response_format: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    grammar: str | None = None  # as llama.cpp's clients send them
    json_schema: Any = None
    structured_outputs: dict[str, Any] | None = None
    timings_per_token: bool | None = None  # llama.cpp's: every chunk says how fast it is
    return_progress: bool | None = (
        None  # llama.cpp's: a stream begins with how much of the prompt was read
    )
    user: str | None = None
    # Known, and refused: an answer without them would look like one with them.
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    use_beam_search: bool | None = None

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


DIRECT = ("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
          "repetition_penalty", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos",
          "skip_special_tokens", "include_stop_str_in_output")  # fmt: skip
REFUSED = ("allowed_token_ids", "bad_words", "use_beam_search")


def sampling_of(body: SamplingFields, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `SamplingParams` that have the same name here; absent ones are the model's `defaults`, or the
    engine's."""
    _check_known(body)
    check_samplers(body)
    fields = {name: value for name in DIRECT if (value := getattr(body, name)) is not None}
    if body.repeat_penalty is not None:
        fields.setdefault("repetition_penalty", body.repeat_penalty)
    fields = with_defaults(defaults, fields)
    if body.logit_bias is not None:
        fields["logit_bias"] = _biases(body.logit_bias)
    if body.stream_options is not None and not body.stream:
        raise Refusal(
            400, "stream_options is given, and stream is not true", param="stream_options"
        )
    return fields


def most_of(body: msgspec.Struct, *names: str) -> int | None:
    """Maximum answer tokens from the first field that is given; None for the remaining context."""
    for name in names:
        most: int | None = getattr(body, name)
        if most == 0:
            message = f"{name} is 0; it has to be at least 1, or -1 for all that the context leaves"
            raise Refusal(400, message, param=name, code="invalid_value")
        if most is not None:
            return most if most > 0 else None
    return None


def _check_known(body: SamplingFields) -> None:
    for name in REFUSED:
        if getattr(body, name):
            message = f"{name} is not supported: {INSTEAD[name]}"
            raise Refusal(400, message, param=name, code="unsupported")
    if body.prompt_logprobs is not None and body.stream:
        message = "prompt_logprobs and stream are given; one of them is supported"
        raise Refusal(400, message, param="prompt_logprobs", code="unsupported")


def _biases(biases: dict[str, float]) -> dict[int, float]:
    check_count("logit_bias", biases, MOST_BIASES)
    by_token = {}
    for token, bias in biases.items():
        if not (token.isascii() and token.isdigit() and len(token) <= 10):
            raise Refusal(
                400,
                f"logit_bias has the key {token[:40]!r}; keys are token ids",
                param="logit_bias",
            )
        by_token[int(token)] = bias
    return by_token
