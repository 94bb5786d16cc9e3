"""Endpoints of llama.cpp's server: POST /completion, /infill and /apply-template, GET /props and /slots.

    prompt, n_predict, temperature ...  ->  content, stop, stop_type, timings; streamed: one event for each piece

Names and defaults are llama.cpp's. `grammar` is GBNF or Lark; what is not supported is refused by name.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec

from cairn import __version__
from cairn.models.infill import ExtraFile
from cairn.models.sampling_defaults import LLAMA_CPP
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.http.chat.conversation import read_conversation
from cairn.serve.http.chat.structure import grammar_for
from cairn.serve.http.endpoints.infill_prompt import infill_prompt
from cairn.serve.http.endpoints.llamacpp_answer import LlamaWriter, Wanted
from cairn.serve.http.endpoints.llamacpp_input import read_biases, read_prompts
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.protocol.requests import TokenizeRequest
from cairn.serve.http.protocol.sampling import (
    NEUTRAL,
    OtherSamplers,
    TopLogprobs,
    check_samplers,
)
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.exchange import Exchange
from cairn.serve.http.server.service import LONG_TEXT, Service
from cairn.serve.prompts import Prompt
from cairn.serve.serving import GenerateRequest
from cairn.serve.structured_output import Guide, grammar_guide, schema_guide

REFUSED = {
    "post_sampling_probs": "n_probs gives log-probabilities before the samplers",
    "image_data": "this model reads text only",
    "lora": "name the adapter as model",
    "n_indent": "this server does not have it: leave it out, or send 0",
}
# What llama.cpp takes where neither the request nor the model says.
LLAMA_DEFAULTS = LLAMA_CPP | {"repetition_penalty": 1.0}
AtMost = Annotated[int, msgspec.Meta(le=2**31 - 1)]  # tokens
LOOK_S = 0.005  # between two looks at an answer that has a limit on its time


class LlamaFields(OtherSamplers, kw_only=True):
    """Fields shared by /completion and /infill. null means the default, as in llama.cpp."""

    # Below 0, or without it and `max_tokens`: what the context leaves. 0: the prompt is read, nothing is said.
    n_predict: AtMost | None = None
    max_tokens: AtMost | None = None  # counts where there is no `n_predict`, as in llama.cpp
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = -1
    stop: list[str] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    return_tokens: bool | None = None
    t_max_predict_ms: float | None = None  # ends the answer, once a line of it is whole
    json_schema: dict[str, Any] | None = None
    model: str | None = None
    grammar: str | None = None
    n_probs: TopLogprobs | None = None  # so many of the likeliest at each token
    post_sampling_probs: bool | None = None
    logit_bias: Any = None  # see `llamacpp_input`
    response_fields: list[str] | None = None  # of the answer; "a/b" is a field within another
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    image_data: Any = None
    lora: Any = None
    n_indent: float | None = None


class LlamaRequest(LlamaFields, kw_only=True):
    """POST /completion"""

    prompt: str | list[Any] | dict[str, Any]  # see `llamacpp_input`


class InfillRequest(LlamaFields, kw_only=True):
    """POST /infill"""

    prompt: str = ""  # how the middle begins
    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] = msgspec.field(default_factory=list)


async def completion(service: Service, call: Call, body: bytes) -> JSON | None:
    payload = decode(body, LlamaRequest)
    _check(payload)
    prompts = await read_prompts(service, payload.prompt)
    service.admission.check(len(prompts))
    return await _answer(service, call, payload, prompts, isinstance(payload.prompt, list))


async def infill(service: Service, call: Call, body: bytes) -> JSON | None:
    """The text between `input_prefix` and `input_suffix`, as editors ask for it."""
    payload = decode(body, InfillRequest)
    _check(payload)
    texts, fields = (payload.input_prefix, payload.input_suffix), ("input_prefix", "input_suffix")
    gap = await infill_prompt(service, *texts, fields, payload.input_extra)
    begun = await service.encode(payload.prompt, special=False) if payload.prompt else []
    return await _answer(service, call, payload, [Prompt(gap.text, gap.token_ids + begun)])


def _check(payload: LlamaFields) -> None:
    for name, instead in REFUSED.items():
        if getattr(payload, name):
            raise Refusal(400, f"{name} is given; {instead}", param=name, code="unsupported")
    check_samplers(payload)


async def _answer(
    service: Service,
    call: Call,
    payload: LlamaFields,
    prompts: Sequence[Prompt],
    listed: bool = False,
) -> JSON | None:
    """`listed`: several answers are a list, which one is not."""
    model = service.check_model(payload.model)
    grammar = await grammar_for(service, _guide_of(payload))
    biases, requests = read_biases(service, payload.logit_bias), []
    for prompt in prompts:
        most = service.most_tokens(_limit(payload), len(prompt.token_ids))
        params = _params(service, payload, most, biases)
        requests.append(GenerateRequest(prompt.token_ids, params, grammar=grammar))
    exchange = Exchange(service, call, requests, model, stream=payload.stream)
    wanted = Wanted(
        prompts=[await _shown(service, prompt) for prompt in prompts],
        tokens=bool(payload.return_tokens),
        probabilities=payload.n_probs or 0,
        text=_most(payload) != 0,
        settings=[_settings(request.params, payload, service) for request in requests],
        fields=payload.response_fields or [],
        timings=bool(payload.timings_per_token),
        progress=bool(payload.return_progress),
        context=service.serving.limits.context,
    )
    writer = LlamaWriter(wanted, model, exchange)
    async with exchange:
        with _time_limit(exchange, payload.t_max_predict_ms or 0.0):
            if payload.stream:
                await exchange.stream(writer)
                return None
            await exchange.finish()
        answers = [writer.whole(job.answer.result()) for job in exchange.jobs]
        return JSON(answers if listed and len(answers) > 1 else answers[0])


async def _shown(service: Service, prompt: Prompt) -> str:
    """The prompt as the model reads it, with its special tokens."""
    if not service.serving.has_tokenizer:
        return prompt.text or ""
    decode_ids, ids = service.tokenizer.decode, prompt.token_ids
    if len(ids) <= LONG_TEXT:
        return decode_ids(ids, False)
    return await asyncio.to_thread(decode_ids, ids, False)


def _settings(params: SamplingParams, payload: LlamaFields, service: Service) -> dict[str, Any]:
    """Generation settings of an answer with llama.cpp's names."""
    most = -1 if params.max_tokens is None else params.max_tokens
    biases = params.logit_bias or {}
    return NEUTRAL | {
        "n_predict": most,
        "max_tokens": most,
        "seed": payload.seed if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in biases.items()],
        "stop": params.stop,
        "ignore_eos": params.ignore_eos,
        "n_probs": params.logprobs or 0,
        "stream": bool(payload.stream),
        "grammar": payload.grammar or "",
        "lora": [],
    }


@contextmanager
def _time_limit(exchange: Exchange, most_ms: float) -> Iterator[None]:
    if most_ms <= 0:
        yield
        return
    watching = asyncio.create_task(_end_late(exchange, most_ms / 1e3))
    try:
        yield
    finally:
        watching.cancel()


async def _end_late(exchange: Exchange, most_s: float) -> None:
    """Counts from the first token, and waits for the end of a line: editors show whole lines."""
    answers = [job.answer for job in exchange.jobs]
    while exchange.since_first_s <= most_s or any("\n" not in one.result().text for one in answers):
        await asyncio.sleep(LOOK_S)
    exchange.abort()


def _guide_of(payload: LlamaFields) -> Guide | None:
    if payload.json_schema is not None and payload.grammar:
        raise Refusal(
            400, "grammar and json_schema both say what the answer looks like", param="grammar"
        )
    if payload.grammar:
        return grammar_guide(payload.grammar, "grammar")
    return None if payload.json_schema is None else schema_guide(payload.json_schema, "json_schema")


def _most(payload: LlamaFields) -> int | None:
    return payload.max_tokens if payload.n_predict is None else payload.n_predict


def _limit(payload: LlamaFields) -> int | None:
    most = _most(payload)
    return None if most is None or most < 0 else max(most, 1)


def _params(
    service: Service, payload: LlamaFields, most: int | None, biases: dict[int, float] | None
) -> SamplingParams:
    adjusted = {
        "temperature": None if payload.temperature is None else max(payload.temperature, 0.0),
        "top_k": None if payload.top_k is None else max(payload.top_k, 0),
        "top_p": payload.top_p,
        "min_p": payload.min_p,
        "repetition_penalty": payload.repeat_penalty,
    }
    sampling: dict[str, Any] = LLAMA_DEFAULTS | service.serving.sampling
    sampling |= {name: value for name, value in adjusted.items() if value is not None}
    return SamplingParams(
        **sampling,
        max_tokens=most,
        presence_penalty=payload.presence_penalty or 0.0,
        frequency_penalty=payload.frequency_penalty or 0.0,
        seed=payload.seed if payload.seed is not None and payload.seed >= 0 else None,
        stop=[word for word in payload.stop or () if word],  # an empty one counts for nothing there
        ignore_eos=bool(payload.ignore_eos),
        logprobs=payload.n_probs or None,
        logit_bias=biases,
    )


async def apply_template(service: Service, call: Call, body: bytes) -> JSON:
    payload = decode(body, TokenizeRequest)
    if payload.messages is None:
        raise Refusal(400, "messages is missing", param="messages", code="missing_field")
    prompt = await read_conversation(service, payload, any_length=True)
    return JSON({"prompt": prompt.text})


async def props(service: Service, call: Call, body: bytes) -> JSON:
    serving, tokenizer = service.serving, service.serving.opened.tokenizer
    named = {} if tokenizer is None else tokenizer.special.named
    sources = {} if tokenizer is None else tokenizer.templates.sources
    params: dict[str, Any] = LLAMA_DEFAULTS | serving.sampling
    params["repeat_penalty"] = params.pop("repetition_penalty")
    params |= {"n_predict": -1, "seed": LlamaFields().seed}
    return JSON(
        {
            "default_generation_settings": {"n_ctx": serving.limits.context, "params": params},
            # Of /v1, where llama.cpp's own defaults count only for GGUF files.
            "v1_params": {"temperature": 1.0} | serving.sampling,
            "total_slots": serving.limits.rows,
            "model_path": Path(service.config.model).name,  # clients need not know the folders
            "model_alias": service.model,
            "chat_template": sources.get("default", ""),
            "bos_token": named.get("bos_token", ""),
            "eos_token": named.get("eos_token", ""),
            "modalities": {"vision": serving.picture_input is not None, "audio": False},
            "build_info": f"cairn {__version__}",
        }
    )


async def slots(service: Service, call: Call, body: bytes) -> JSON:
    """A row of the engine's batch is what llama.cpp calls a slot."""
    limits, running = service.serving.limits, service.serving.engine.stats().running
    return JSON(
        [
            {"id": row, "n_ctx": limits.context, "is_processing": row < running}
            for row in range(limits.rows)
        ]
    )
