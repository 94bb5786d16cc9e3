"""POST /v1/audio/transcriptions and /v1/audio/translations: speech as text, as OpenAI's clients ask for it.

    multipart: file, model, language, prompt, temperature, stream, response_format (json, text, srt, vtt, verbose_json)

Sound is decoded beside the event loop, in a process of its own (`models/speech/sound_file`); the rest of a request goes
the way of all others: admission, deadlines, keys, the ledger.
"""

import asyncio
import math

from starlette.responses import PlainTextResponse, Response

from cairn.models.speech.sound_file import read_sound
from cairn.models.speech.transcribe import Task, WindowOptions
from cairn.serve.answer import CompletionOutput
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.http.protocol.multipart import Part, read_parts
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.protocol.transcripts import FORMATS, written
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.exchange import Exchange
from cairn.serve.http.server.service import Service
from cairn.serve.http.server.sse import event_bytes, last_events
from cairn.serve.serving import GenerateRequest
from cairn.serve.speech_serving import OpenSpeech
from cairn.serve.speech_thread import Speech, Transcript


async def transcriptions(service: Service, call: Call, body: bytes) -> Response | None:
    return await _answer(service, call, body, "transcribe")


async def translations(service: Service, call: Call, body: bytes) -> Response | None:
    """Into English."""
    return await _answer(service, call, body, "translate")


async def _answer(service: Service, call: Call, body: bytes, task: Task) -> Response | None:
    opened = service.serving.opened
    if not isinstance(opened, OpenSpeech):
        message = f"{service.model} does not hear; serve a Whisper for /v1/audio"
        raise Refusal(400, message, param="model", code="no_speech_model")
    headers = dict(call.scope["headers"])
    parts = read_parts(headers.get(b"content-type", b"").decode("latin-1"), body)
    if "file" not in parts:
        raise Refusal(400, "file is missing", param="file")
    model = service.check_model(_text(parts, "model"))
    form = _text(parts, "response_format") or "json"
    if form not in FORMATS:
        message = f"response_format is {form!r}; it has to be one of {', '.join(FORMATS)}"
        raise Refusal(400, message, param="response_format")
    _refuse_absent(parts)
    task_tokens = _wanted(opened, parts, task)
    samples = await asyncio.to_thread(read_sound, parts["file"].content)
    start = opened.whisper.tokens.start
    params = SamplingParams(max_tokens=1, temperature=0, pooling="last")
    request = GenerateRequest([start], params, media=Speech(samples, task_tokens))
    streams = (_text(parts, "stream") or "false").lower() in ("true", "1")
    async with Exchange(service, call, [request], model, stream=streams) as exchange:
        if streams:
            await exchange.stream(TranscriptEvents())
            return None
        await exchange.finish()
        transcript = exchange.jobs[0].result
    if not isinstance(transcript, Transcript):
        raise Refusal(
            503, "the request was ended before it was heard", code="timeout", retry_after_s=1
        )
    content = written(transcript, form, task)
    if form in ("json", "verbose_json"):
        return Response(content, media_type="application/json")
    return PlainTextResponse(content)


class TranscriptEvents:
    """The text of each window as it is transcribed, then all of it."""

    def __init__(self) -> None:
        self._text = ""

    def write(self, delta: CompletionOutput) -> bytes:
        self._text += delta.text
        if not delta.text:
            return b""
        return event_bytes({"type": "transcript.text.delta", "delta": delta.text})

    def last(self) -> bytes:
        return last_events({"type": "transcript.text.done", "text": self._text.strip()})

    def refused(self, refusal: Refusal) -> bytes:
        return last_events(refusal.body())


def _wanted(opened: OpenSpeech, parts: dict[str, Part], task: Task) -> WindowOptions:
    tokens, language = opened.whisper.tokens, _text(parts, "language")
    if language and opened.whisper.spec.multilingual and language not in tokens.languages:
        message = f"language is {language!r}; it has to be a code such as {', '.join(list(tokens.languages)[:5])}"
        raise Refusal(400, message, param="language")
    if task == "translate" and not opened.whisper.spec.multilingual:
        raise Refusal(400, f"{opened.name} knows English only", param="model")
    prompt = _text(parts, "prompt")
    before = (
        opened.tokenizer.encode(f" {prompt.strip()}", special=False)
        if prompt and opened.tokenizer
        else []
    )
    return WindowOptions(
        task, language or None, tuple(before), _temperature(_text(parts, "temperature"))
    )


def _temperature(text: str | None) -> float | None:
    """0, OpenAI's default, is the ladder that begins there."""
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise Refusal(
            400, f"temperature is {text!r}; it has to be between 0 and 1", param="temperature"
        )
    return value or None


def _refuse_absent(parts: dict[str, Part]) -> None:
    """Reject unsupported options instead of ignoring them."""
    words = _text(parts, "timestamp_granularities[]")
    if words not in (None, "segment"):
        message = f"timestamp_granularities is {words!r}; there is segment"
        raise Refusal(400, message, param="timestamp_granularities[]")


def _text(parts: dict[str, Part], name: str) -> str | None:
    part = parts.get(name)
    return None if part is None else part.content.decode("utf-8", "replace").strip()
