"""POST /v1/chat/completions: a conversation in, the next message out; whole or as a stream.

messages -prepare-> GenerateRequest -exchange-> deltas -Reader-> parts of a message -> one document, or chunks
"""

import time

import msgspec

from cairn.serve.answer import CompletionOutput
from cairn.serve.http.chat.prepare import PreparedChat, prepare_chat
from cairn.serve.http.chat.reader import joined
from cairn.serve.http.chat.structure import guide_of
from cairn.serve.http.chat.thought_tokens import thought_tokens
from cairn.serve.http.endpoints.llamacpp_answer import prompt_progress, timings
from cairn.serve.http.endpoints.logprobs import chat_logprobs, prompt_rows
from cairn.serve.http.protocol.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ReasoningTokens,
    Usage,
    reason_of,
)
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.protocol.requests import ChatRequest
from cairn.serve.http.protocol.sampling import most_of
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.exchange import Exchange
from cairn.serve.http.server.service import Service
from cairn.serve.http.server.sse import HOLE, Template, event_bytes, last_events
from cairn.serve.job import Job


async def chat_completions(service: Service, call: Call, body: bytes) -> JSON | None:
    payload = decode(body, ChatRequest)
    model = service.check_model(payload.model)
    if payload.top_logprobs is not None and not payload.logprobs:
        raise Refusal(400, "top_logprobs is given, and logprobs is not true", param="top_logprobs")
    _check_offered(payload)
    service.admission.check(payload.n or 1)
    most = most_of(payload, "max_completion_tokens", "max_tokens", "n_predict")
    logprobs = (payload.top_logprobs or 0) if payload.logprobs else None
    prepared = await prepare_chat(service, payload, guide_of(payload), most, logprobs)
    call.cut_to = prepared.cut_to
    reply = ChatReply(service, payload, prepared, model, call)
    exchange = Exchange(
        service, call, [prepared.request], model, stream=payload.stream, ledger=payload.ledger
    )
    async with exchange:
        if payload.stream:
            await exchange.stream(ChunkWriter(reply, exchange))
            return None
        await exchange.finish()
        return JSON(reply.whole(exchange), headers={"x-request-id": call.id})


def _check_offered(payload: ChatRequest) -> None:
    """An answer without what these ask for would look as if the model had not wanted it."""
    if payload.functions:
        raise Refusal(400, "functions is given; use tools", param="functions", code="unsupported")
    if payload.web_search_options is not None:
        message = "web_search_options is given; this server runs no tools itself"
        raise Refusal(400, message, param="web_search_options", code="unsupported")
    other = [kind for kind in payload.modalities or () if kind != "text"]
    if other:
        message = f"modalities has {other[0][:40]!r}; this server answers with text"
        raise Refusal(400, message, param="modalities", code="unsupported")


class ChatReply:
    """Response writer of a chat request."""

    def __init__(
        self, service: Service, payload: ChatRequest, prepared: PreparedChat, model: str, call: Call
    ) -> None:
        self.service, self.payload = service, payload
        self.prompt, self.readers = prepared.prompt, prepared.readers
        self.id, self.model, self.created = f"chatcmpl-{call.id}", model, int(time.time())
        self._thoughts: dict[int, list[str]] = {}  # by answer: of several the parts come mixed

    def whole(self, exchange: Exchange) -> ChatCompletion:
        choices = []
        for job in exchange.jobs:
            done = job.answer.result()
            reader = self.readers[done.index]
            parts = self._read(done)
            choice = ChatChoice(
                index=done.index,
                message=joined(parts, reader.unfinished),
                logprobs=self.logprobs(done),
                finish_reason=reader.reason(reason_of(done)),
                stop_reason=done.stop_reason,
            )
            if self.payload.return_token_ids:
                choice.token_ids = done.token_ids
            choices.append(choice)
        whole = ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self.usage(exchange),
        )
        whole.timings = self.timings(exchange)
        if self.payload.return_token_ids:
            whole.prompt_token_ids = self.prompt.token_ids
        if (most := self.payload.prompt_logprobs) is not None:
            tokenizer = self.service.serving.opened.tokenizer
            whole.prompt_logprobs = prompt_rows(exchange.jobs[0], most, tokenizer)
        return whole

    def logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if output.logprobs is None:
            return None
        top, tokenizer = self.payload.top_logprobs or 0, self.service.serving.opened.tokenizer
        as_ids = self.payload.return_tokens_as_token_ids is True
        rows = chat_logprobs(output.token_ids, output.logprobs, top, tokenizer, as_ids)
        return ChatLogprobs(rows)

    def _read(self, delta: CompletionOutput) -> list[ChatDelta]:
        parts = self.readers[delta.index].push(delta.text, delta.finished)
        thoughts = [part.reasoning_content for part in parts if part.reasoning_content]
        if thoughts:
            self._thoughts.setdefault(delta.index, []).extend(thoughts)
        return parts

    def usage(self, exchange: Exchange, ended: bool = True) -> Usage:
        completion_tokens = sum(len(job.answer.whole.token_ids) for job in exchange.jobs)
        prompt_tokens = len(self.prompt.token_ids)
        # Not while an answer grows: its tokens would be looked at again for each new one.
        thoughts = sum(map(self._thought_tokens, exchange.jobs)) if ended else 0
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=exchange.prompt_details,
            completion_tokens_details=ReasoningTokens(thoughts),
        )

    def _thought_tokens(self, job: Job) -> int:
        thought = "".join(self._thoughts.get(job.answer.index, ()))
        return thought_tokens(job.answer.whole.token_ids, thought, self.service.tokenizer)

    def timings(self, exchange: Exchange) -> dict[str, float]:
        """Timings of the first answer in llama.cpp's format."""
        job = exchange.jobs[0]
        return timings(exchange, job, len(job.answer.whole.token_ids))

    def chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | msgspec.UnsetType | None = msgspec.UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def chunks_of(self, delta: CompletionOutput) -> list[ChatChunkChoice]:
        """Chunks of a delta; the last one contains the finish reason."""
        reader, index = self.readers[delta.index], delta.index
        parts = self._read(delta)
        reason = reader.reason(reason_of(delta))
        if not parts and (reason is not None or delta.logprobs or self.payload.return_token_ids):
            parts = [ChatDelta()]
        choices = [ChatChunkChoice(index=index, delta=part) for part in parts]
        if choices:
            choices[0].logprobs = self.logprobs(delta)
            choices[-1].finish_reason = reason
            if delta.finished:
                choices[-1].stop_reason = delta.stop_reason
            if self.payload.return_token_ids:
                choices[0].token_ids = delta.token_ids
        return choices


class ChunkWriter:
    """The chunks of a stream as bytes. Most are nothing but more text, which takes a template and no Struct."""

    def __init__(self, reply: ChatReply, exchange: Exchange) -> None:
        self.reply, self.exchange = reply, exchange
        payload = reply.payload
        self._usage = None if payload.wants_usage else msgspec.UNSET  # of a chunk that has none
        self._timed = payload.timings_per_token is True
        self._same = not (
            payload.wants_running_usage
            or payload.logprobs
            or payload.return_token_ids
            or self._timed
        )
        self._greeted: set[int] = set()
        self._plain: dict[int, Template] = {}  # by answer, once all that follows is content

    def write(self, delta: CompletionOutput) -> bytes:
        template = self._plain.get(delta.index)
        if template is None or delta.finish_reason is not None:
            return b"".join(map(event_bytes, self.chunks(delta)))
        return template.fill(delta.text) if delta.text else b""

    def chunks(self, delta: CompletionOutput) -> list[ChatChunk]:
        """Any delta, as the documents that it is."""
        reply, index = self.reply, delta.index
        choices = reply.chunks_of(delta)
        first = not self._greeted
        if index not in self._greeted:
            self._greeted.add(index)
            hello = ChatDelta(role="assistant", content="")
            choices.insert(0, ChatChunkChoice(index=index, delta=hello))
        if self._same and index not in self._plain and reply.readers[index].passes:
            more = ChatChunkChoice(index=index, delta=ChatDelta(content=HOLE))
            self._plain[index] = Template(reply.chunk([more], self._usage))
        running = reply.payload.wants_running_usage
        usage = reply.usage(self.exchange, ended=False) if running else self._usage
        chunks = [reply.chunk([choice], usage) for choice in choices]
        if chunks and (self._timed or delta.finished):
            chunks[-1].timings = reply.timings(self.exchange)
        if first and reply.payload.return_progress:
            read = [reply.chunk([], usage) for _ in ("from", "to")]
            for chunk, progress in zip(read, prompt_progress(self.exchange), strict=True):
                chunk.prompt_progress = progress
            chunks[1:1] = read  # behind the one that names the role
        return chunks

    def last(self) -> bytes:
        reply = self.reply
        if not reply.payload.wants_usage:
            return last_events()
        return last_events(reply.chunk([], reply.usage(self.exchange)))

    def refused(self, refusal: Refusal) -> bytes:
        return last_events(refusal.body())
