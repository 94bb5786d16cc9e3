"""POST /v1/chat/completions: a conversation in, the next message out; whole or as a stream.

    messages -conversation-> prompt -exchange-> deltas -Reader-> parts of a message -> one document, or chunks

What shape the answers have to have is `structure`'s to say; how their text becomes content, reasoning and tool calls is
`reader`'s.
"""

import time
from collections.abc import Callable

import msgspec

from cairn.serve.answer import CompletionOutput
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine_thread import Job
from cairn.serve.grammar import Grammar
from cairn.serve.http.chat.conversation import read_conversation
from cairn.serve.http.chat.reader import joined, keeps_marks, make_readers
from cairn.serve.http.chat.structure import Offer, Thinking, grammar_of, offer_of, thinking_of
from cairn.serve.http.endpoints.completions import reason_of
from cairn.serve.http.endpoints.logprobs import chat_logprobs
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.protocol_answers import (
    CachedTokens,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Usage,
)
from cairn.serve.http.protocol.protocol_requests import ChatRequest
from cairn.serve.http.protocol.protocol_sampling import sampling_of
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.server.answer_stream import stream_answers
from cairn.serve.http.server.exchange import Exchange
from cairn.serve.http.server.service import Service
from cairn.serve.http.server.sse import HOLE, Template, event_bytes, last_events
from cairn.serve.http.tools.call import Call
from cairn.serve.prompts import Prompt


async def chat_completions(service: Service, call: Call, body: bytes) -> JSON | None:
    asked = decode(body, ChatRequest)
    model = service.check_model(asked.model)
    _check(asked)
    service.admission.check(asked.n or 1)
    offer = offer_of(service, asked)
    prompt = await read_conversation(service, asked)
    thinking = thinking_of(service, prompt.text or "")
    grammar = await grammar_of(service, asked, offer, thinking)
    work = Work(service, asked, prompt, offer, thinking, grammar, model, call)
    exchange = service.exchange(call, work.jobs, stream=asked.stream, ledger=asked.ledger)
    async with exchange:
        if asked.stream:
            await stream_answers(call, exchange, ChunkWriter(work, exchange))
            return None
        while not exchange.finished:
            await exchange.next()
        return JSON(work.whole(exchange), headers={"x-request-id": call.id})


def _check(asked: ChatRequest) -> None:
    if asked.top_logprobs is not None and not asked.logprobs:
        raise Refusal(400, "top_logprobs is given, and logprobs is not true", param="top_logprobs")


class Work:
    """A checked request, and how its answers are written."""

    def __init__(
        self,
        service: Service,
        asked: ChatRequest,
        prompt: Prompt,
        offer: Offer | None,
        thinking: Thinking,
        grammar: Grammar | None,
        model: str,
        call: Call,
    ) -> None:
        self.service, self.asked, self.prompt, self.grammar = service, asked, prompt, grammar
        guided = grammar is not None
        self.params = self._params()
        if keeps_marks(service.tokenizer, offer, thinking, guided):
            self.params = msgspec.structs.replace(self.params, skip_special_tokens=False)
        self.readers = make_readers(offer, thinking, guided, self.params.n)
        self.id, self.model, self.created = f"chatcmpl-{call.id}", model, int(time.time())

    def _params(self) -> SamplingParams:
        asked = self.asked
        most = asked.max_completion_tokens or asked.max_tokens
        largest = self.service.config.max_request_tokens
        if largest is not None:
            room = self.service.backend.limits.context - len(self.prompt.token_ids)
            most = min(most or max(1, room), largest)
        wanted = (asked.top_logprobs or 0) if asked.logprobs else None
        return SamplingParams(**sampling_of(asked), max_tokens=most, logprobs=wanted)

    def jobs(self, on_news: Callable[[Job], None]) -> list[Job]:
        return self.service.backend.jobs(
            self.prompt.token_ids, self.params, on_news, priority=self.asked.priority or 0,
            salt=self.asked.cache_salt or "", grammar=self.grammar,
        )  # fmt: skip

    # -- writing ---------------------------------------------------------------------------------

    def whole(self, exchange: Exchange) -> ChatCompletion:
        choices = []
        for job in exchange.jobs:
            done = job.answer.result()
            reader = self.readers[done.index]
            choice = ChatChoice(
                index=done.index, message=joined(reader.push(done.text, True)), logprobs=self.logprobs(done),
                finish_reason=reader.reason(reason_of(done)), stop_reason=done.stop_reason,
            )  # fmt: skip
            if self.asked.return_token_ids:
                choice.token_ids = done.token_ids
            choices.append(choice)
        whole = ChatCompletion(id=self.id, created=self.created, model=self.model, choices=choices,
                               usage=self.usage(exchange))  # fmt: skip
        if self.asked.return_token_ids:
            whole.prompt_token_ids = self.prompt.token_ids
        return whole

    def logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if output.logprobs is None:
            return None
        top, tokenizer = self.asked.top_logprobs or 0, self.service.backend.tokenizer
        return ChatLogprobs(chat_logprobs(output.token_ids, output.logprobs, top, tokenizer))

    def usage(self, exchange: Exchange) -> Usage:
        made = sum(len(job.answer.whole.token_ids) for job in exchange.jobs)
        asked = len(self.prompt.token_ids)
        return Usage(prompt_tokens=asked, completion_tokens=made, total_tokens=asked + made,
                     prompt_tokens_details=CachedTokens(exchange.cached))  # fmt: skip

    def chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | msgspec.UnsetType | None = msgspec.UNSET,
    ) -> ChatChunk:
        return ChatChunk(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def chunks_of(self, delta: CompletionOutput) -> list[ChatChunkChoice]:
        """What a client sees of a delta; the end is in the last of them."""
        reader, index = self.readers[delta.index], delta.index
        parts = reader.push(delta.text, delta.finished)
        reason = reader.reason(reason_of(delta))
        if not parts and (reason is not None or delta.logprobs or self.asked.return_token_ids):
            parts = [ChatDelta()]
        made = [ChatChunkChoice(index=index, delta=part) for part in parts]
        if made:
            made[0].logprobs = self.logprobs(delta)
            made[-1].finish_reason = reason
            if self.asked.return_token_ids:
                made[0].token_ids = delta.token_ids
        return made


class ChunkWriter:
    """The chunks of a stream as bytes. Most are nothing but more text, which takes a template and no Struct."""

    def __init__(self, work: Work, exchange: Exchange) -> None:
        self.work, self.exchange = work, exchange
        asked = work.asked
        self._usage = None if asked.wants_usage else msgspec.UNSET  # of a chunk that has none
        self._same = not (asked.wants_running_usage or asked.logprobs or asked.return_token_ids)
        self._greeted: set[int] = set()
        self._plain: dict[int, Template] = {}  # by answer, once all that follows is content

    def write(self, delta: CompletionOutput) -> bytes:
        template = self._plain.get(delta.index)
        if template is None or delta.finish_reason is not None:
            return b"".join(map(event_bytes, self.chunks(delta)))
        return template.fill(delta.text) if delta.text else b""

    def chunks(self, delta: CompletionOutput) -> list[ChatChunk]:
        """Any delta, as the documents that it is."""
        work, index = self.work, delta.index
        choices = work.chunks_of(delta)
        if index not in self._greeted:
            self._greeted.add(index)
            hello = ChatDelta(role="assistant", content="")
            choices.insert(0, ChatChunkChoice(index=index, delta=hello))
        if self._same and index not in self._plain and work.readers[index].passes:
            more = ChatChunkChoice(index=index, delta=ChatDelta(content=HOLE))
            self._plain[index] = Template(work.chunk([more], self._usage))
        running = work.asked.wants_running_usage
        usage = work.usage(self.exchange) if running else self._usage
        return [work.chunk([choice], usage) for choice in choices]

    def last(self) -> bytes:
        work = self.work
        if not work.asked.wants_usage:
            return last_events()
        return last_events(work.chunk([], work.usage(self.exchange)))

    def refused(self, refusal: Refusal) -> bytes:
        return last_events(refusal.body())
