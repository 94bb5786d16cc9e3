"""Ollama's POST /api/chat and /api/generate. `ollama_models` lists and describes models.

    messages, options, format, tools, think  ->  ChatRequest -prepare-> the same engine
    deltas  ->  one JSON document on each line, the last one with `done` and the counts

Streams unless `stream` is false. `num_ctx` and `keep_alive` change nothing: the model is loaded, with its context.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from cairn.serve.answer import CompletionOutput, Logprob
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.http.chat.prepare import PreparedChat, prepare_chat
from cairn.serve.http.chat.reader import PlainText, Reader, joined
from cairn.serve.http.chat.structure import grammar_for
from cairn.serve.http.endpoints.infill_prompt import infill_prompt
from cairn.serve.http.endpoints.logprobs import Found, chat_logprobs
from cairn.serve.http.endpoints.ollama_models import check_served, served_name
from cairn.serve.http.endpoints.prompt_inputs import read_inputs
from cairn.serve.http.protocol.answers import ChatDelta, ToolCall, reason_of
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.protocol.requests import ChatRequest
from cairn.serve.http.protocol.sampling import Count, TopLogprobs, sampling_of
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.exchange import Exchange
from cairn.serve.http.server.service import Service
from cairn.serve.http.server.sse import NDJSON
from cairn.serve.serving import GenerateRequest
from cairn.serve.structured_output import Guide, schema_guide

SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
)
MOST_TOKENS = 2**31 - 1
Kind = Literal["message", "response"]  # the field that has the text
_encode = msgspec.json.Encoder().encode


class OllamaRequest(msgspec.Struct, kw_only=True):
    model: str
    stream: bool | None = None  # it is, unless false
    format: Literal["json", ""] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None  # counts only beside `logprobs`, as in Ollama


class OllamaChat(OllamaRequest, kw_only=True):
    """POST /api/chat"""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


class OllamaGenerate(OllamaRequest, kw_only=True):
    """POST /api/generate"""

    prompt: str = ""
    system: str | None = None
    raw: bool = False
    suffix: str | None = None
    images: list[str] | None = None
    context: list[Count] | None = None  # of the answer that this one goes on from
    template: str | None = None


def ollama_error(refusal: Refusal) -> JSON:
    return JSON({"error": refusal.message}, refusal.status, refusal.headers())


async def api_chat(service: Service, call: Call, body: bytes) -> JSON | None:
    payload = decode(body, OllamaChat)
    model = check_served(service, payload.model)
    if not payload.messages:
        return _loaded(model, "message")
    if service.serving.picture_input is None:
        for at, message in enumerate(payload.messages):
            if message.get("images"):
                refused = f"messages[{at}].images is given; this model reads text only"
                raise Refusal(400, refused, param="messages", code="unsupported")
    chat = _chat_of(payload, [_with_images(message) for message in payload.messages])
    chat.tools = payload.tools
    chat.continue_final_message = _goes_on(payload.messages[-1])
    prepared = await prepare_chat(
        service, chat, _guide_of(payload), _limit(payload), _logprobs(payload)
    )
    return await _answer(service, call, payload, prepared, LineWriter("message", model))


def _loaded(model: str, kind: Kind) -> JSON:
    """Their clients load a model by asking it nothing."""
    return JSON(_line(model, kind, "") | {"done": True, "done_reason": "load"})


def _goes_on(last: dict[str, Any]) -> bool | None:
    """Return whether the answer continues the last message, as Ollama does for one of the assistant."""
    is_answer = last.get("role") == "assistant" and not last.get("tool_calls")
    return True if is_answer and last.get("content") else None


def _with_images(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose images, which Ollama's clients send as base64, are parts of its content."""
    images = message.get("images")
    if not isinstance(images, list) or not images:
        return {key: value for key, value in message.items() if key != "images"}
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": f"data:image/png;base64,{one}"} for one in images
    ]
    rest = {key: value for key, value in message.items() if key != "images"}
    text = {"type": "text", "text": message.get("content") or ""}
    return rest | {"content": [*parts, text]}


async def api_generate(service: Service, call: Call, body: bytes) -> JSON | None:
    payload = decode(body, OllamaGenerate)
    model = check_served(service, payload.model)
    if payload.template:
        raise Refusal(400, "template is not supported", param="template", code="unsupported")
    if payload.system and (payload.raw or payload.suffix):
        beside = "raw" if payload.raw else "suffix"
        message = f"system and {beside} are given; such a prompt has no place for a system message"
        raise Refusal(400, message, param="system")
    if payload.images and (payload.raw or service.serving.picture_input is None):
        message = (
            "images is given; "
            + ("raw prompts are" if payload.raw else "this model reads")
            + " text only"
        )
        raise Refusal(400, message, param="images", code="unsupported")
    if not payload.prompt:
        return _loaded(model, "response")
    if (
        payload.suffix
        or payload.raw
        or not (service.serving.has_tokenizer and service.tokenizer.templates)
        or service.serving.assumed_template  # Ollama adds nothing to the prompt of a model without one
    ):
        prepared = await _prepare_text(service, payload)
    else:
        system = [{"role": "system", "content": payload.system}] if payload.system else []
        user = {"role": "user", "content": payload.prompt, "images": payload.images}
        chat = _chat_of(payload, [*system, _with_images(user)])
        prepared = await prepare_chat(
            service,
            chat,
            _guide_of(payload),
            _limit(payload),
            _logprobs(payload),
            payload.context or (),
        )
    writer = LineWriter("response", model)
    writer.has_context = not payload.raw  # as with Ollama
    return await _answer(service, call, payload, prepared, writer)


async def _prepare_text(service: Service, payload: OllamaGenerate) -> PreparedChat:
    if payload.suffix:
        prompt = await infill_prompt(service, payload.prompt, payload.suffix, ("prompt", "suffix"))
    else:
        [prompt] = await read_inputs(service, payload.prompt, "prompt", 1)
        if payload.context:
            text = await service.encode(payload.prompt, special=False)
            prompt = prompt._replace(token_ids=[*payload.context, *text])
    grammar = await grammar_for(service, _guide_of(payload))
    most = service.most_tokens(_limit(payload), len(prompt.token_ids))
    sampling = sampling_of(_chat_of(payload, []), service.serving.sampling)
    params = SamplingParams(**sampling, max_tokens=most, logprobs=_logprobs(payload))
    request = GenerateRequest(prompt.token_ids, params, grammar=grammar)
    return PreparedChat(prompt, request, [PlainText()])


async def _answer(
    service: Service,
    call: Call,
    payload: OllamaRequest,
    prepared: PreparedChat,
    writer: "LineWriter",
) -> JSON | None:
    model = served_name(service, payload.model)
    streams = payload.stream is not False
    exchange = Exchange(service, call, [prepared.request], model, stream=streams)
    writer.begin(exchange, prepared.readers[0], _logprobs(payload))
    async with exchange:
        if streams:
            await exchange.stream(writer, NDJSON)
            return None
        await exchange.finish()
        return JSON(writer.whole(exchange.jobs[0].answer.result()))


# -- what is asked --------------------------------------------------------------------------------


def _chat_of(payload: OllamaRequest, messages: list[dict[str, Any]]) -> ChatRequest:
    options = payload.options or {}
    fields = {name: options[name] for name in SAMPLING if options.get(name) is not None}
    if options.get("repeat_penalty") is not None:
        fields["repetition_penalty"] = options["repeat_penalty"]
    try:
        decode(_encode({"messages": [], **fields}), ChatRequest)
    except Refusal as refusal:
        raise Refusal(400, f"options.{refusal.message}", param="options") from None
    chat = msgspec.convert({"messages": messages, **fields}, ChatRequest)
    if payload.think is not None:
        chat.chat_template_kwargs = {"enable_thinking": bool(payload.think)}
    if isinstance(payload.think, str):
        chat.reasoning_effort = payload.think
    return chat


def _limit(payload: OllamaRequest) -> int | None:
    most = (payload.options or {}).get("num_predict")
    if most is not None and (type(most) is not int or most > MOST_TOKENS):
        message = f"options.num_predict is {str(most)[:40]}; it has to be a whole number up to {MOST_TOKENS}"
        raise Refusal(400, message, param="options")
    return most if most is not None and most > 0 else None


def _logprobs(payload: OllamaRequest) -> int | None:
    """So many of the likeliest tokens beside each; None: no log-probabilities."""
    return (payload.top_logprobs or 0) if payload.logprobs else None


def _guide_of(payload: OllamaRequest) -> Guide | None:
    if not payload.format:
        return None
    schema = {"type": "object"} if payload.format == "json" else payload.format
    return schema_guide(schema, "format")


# -- what is answered -----------------------------------------------------------------------------


def _line(model: str, kind: Kind, text: str) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    message = {"role": "assistant", "content": text} if kind == "message" else text
    return {"model": model, "created_at": now, kind: message, "done": False}


class LineWriter:
    """An answer as lines of JSON, or as one document."""

    has_context = False  # the tokens of the prompt and the answer are told, for the next prompt

    def __init__(self, kind: Kind, model: str) -> None:
        self._kind, self._model = kind, model
        self._calls: list[ChatDelta] = []
        self._reason = "stop"
        # Of tokens whose text has not come yet.
        self._ids: list[int] = []
        self._scores: list[dict[int, Logprob]] = []

    def begin(self, exchange: Exchange, reader: Reader, top: int | None) -> None:
        self._exchange, self._reader, self._top = exchange, reader, top

    def write(self, delta: CompletionOutput) -> bytes:
        parts = self._reader.push(delta.text, delta.finished)
        if delta.finished:
            self._reason = "length" if reason_of(delta) == "length" else "stop"
        self._calls += [part for part in parts if part.tool_calls]
        self._ids += delta.token_ids
        self._scores += delta.logprobs or ()
        lines = [line for part in parts if (line := self._piece(part))]
        if lines:
            lines[0] |= self._held_logprobs()
        return b"".join(_encode(line) + b"\n" for line in lines)

    def last(self) -> bytes:
        line = _line(self._model, self._kind, "")
        if self._calls:
            line["message"]["tool_calls"] = _calls(joined(self._calls).tool_calls)
        return _encode(line | self._held_logprobs() | self._end()) + b"\n"

    def refused(self, refusal: Refusal) -> bytes:
        return _encode({"error": refusal.message}) + b"\n"

    def whole(self, output: CompletionOutput) -> dict[str, Any]:
        self._reason = "length" if reason_of(output) == "length" else "stop"
        message = joined(self._reader.push(output.text, True))
        line = _line(self._model, self._kind, message.content or "")
        inside = line["message"] if self._kind == "message" else line
        if message.reasoning_content:
            inside["thinking"] = message.reasoning_content
        if message.tool_calls:
            inside["tool_calls"] = _calls(message.tool_calls)
        return line | self._written(output.token_ids, output.logprobs or []) | self._end()

    def _held_logprobs(self) -> dict[str, Any]:
        ids, scores = self._ids, self._scores
        self._ids, self._scores = [], []
        return self._written(ids, scores)

    def _written(self, ids: Sequence[int], scores: Sequence[Found]) -> dict[str, Any]:
        if self._top is None or not scores:
            return {}
        tokenizer = self._exchange.jobs[0].answer.tokenizer
        return {"logprobs": chat_logprobs(ids, scores, self._top, tokenizer)}

    def _piece(self, part: ChatDelta) -> dict[str, Any] | None:
        if not (part.content or part.reasoning_content):
            return None
        line = _line(self._model, self._kind, part.content or "")
        if part.reasoning_content:
            inside = line["message"] if self._kind == "message" else line
            inside["thinking"] = part.reasoning_content
        return line

    def _end(self) -> dict[str, Any]:
        job = self._exchange.jobs[0]
        prompt_s, decode_s = self._exchange.seconds
        tokens = [*job.request.prompt, *job.answer.whole.token_ids] if self.has_context else None
        return ({} if tokens is None else {"context": tokens}) | {
            "done": True,
            "done_reason": self._reason,
            "total_duration": int((prompt_s + self._exchange.since_first_s) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": len(job.request.prompt),
            "prompt_eval_duration": int(prompt_s * 1e9),
            "eval_count": len(job.answer.whole.token_ids),
            "eval_duration": int(decode_s * 1e9),
        }


def _calls(calls: "list[ToolCall] | msgspec.UnsetType") -> list[dict[str, Any]]:
    entries = []
    for call in calls or ():
        if call.function is not None:
            arguments = _arguments(call.function.arguments or "{}")
            entries.append({"function": {"name": call.function.name, "arguments": arguments}})
    return entries


def _arguments(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return {"unfinished": text}
