"""POST /v1/completions: text or token ids in, text out; whole or as a stream.

prompt   "text" | ["text", ...] | [1, 2, 3] | [[1, 2], [3], ...]      choices: n for each prompt, in their order
suffix   the answer belongs between prompt and suffix, for models that know how (fill in the middle)
echo     the prompt comes first, with its log-probabilities if logprobs is given: what evaluation tools ask for
"""

import time

import msgspec

from cairn.serve.answer import CompletionOutput, readable_prompt
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.grammar import Grammar
from cairn.serve.http.chat.structure import grammar_for, guide_of
from cairn.serve.http.endpoints.infill_prompt import infill_prompt
from cairn.serve.http.endpoints.llamacpp_answer import timings
from cairn.serve.http.endpoints.logprobs import TextOffsets, completion_logprobs, prompt_rows
from cairn.serve.http.endpoints.prompt_inputs import count_inputs, cut_inputs, read_inputs
from cairn.serve.http.protocol.answers import (
    CachedTokens,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
    reason_of,
)
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.protocol.requests import CompletionRequest
from cairn.serve.http.protocol.sampling import sampling_of
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.exchange import Exchange
from cairn.serve.http.server.service import Service
from cairn.serve.http.server.sse import HOLE, Template, event_bytes, last_events
from cairn.serve.job import Job
from cairn.serve.prompts import Prompt
from cairn.serve.serving import GenerateRequest

DEFAULT_TOKENS = 16  # OpenAI's default for this endpoint
MOST_PROMPTS = 1024


async def completions(service: Service, call: Call, body: bytes) -> JSON | None:
    payload = decode(body, CompletionRequest)
    model = service.check_model(payload.model)
    _check(payload)
    service.admission.check(count_inputs(payload.prompt) * (payload.n or 1))
    prompts = await _prompts(service, payload)
    grammar = await grammar_for(service, guide_of(payload))
    reply = CompletionReply(service, payload, prompts, model, call)
    requests = reply.requests(grammar)
    exchange = Exchange(
        service, call, requests, model, stream=payload.stream, ledger=payload.ledger
    )
    async with exchange:
        if payload.stream:
            await exchange.stream(ChunkWriter(reply, exchange))
            return None
        await exchange.finish()
        return JSON(reply.whole(exchange), headers={"x-request-id": call.id})


async def _prompts(service: Service, payload: CompletionRequest) -> list[Prompt]:
    answer = _limit(payload)
    longest = service.most_prompt_tokens(
        payload.truncate_prompt_tokens, None if answer < 0 else answer
    )
    special = payload.add_special_tokens is not False
    if longest is not None:
        return await cut_inputs(service, payload.prompt, "prompt", MOST_PROMPTS, longest, special)
    if not payload.suffix:
        return await read_inputs(service, payload.prompt, "prompt", MOST_PROMPTS, special)
    if not isinstance(payload.prompt, str):
        raise Refusal(400, "suffix is given; prompt has to be one text then", param="prompt")
    return [await infill_prompt(service, payload.prompt, payload.suffix, ("prompt", "suffix"))]


def _limit(payload: CompletionRequest) -> int:
    """Most tokens of an answer; -1: what the context leaves."""
    given = payload.n_predict if payload.max_tokens is None else payload.max_tokens
    return DEFAULT_TOKENS if given is None else given


def _check(payload: CompletionRequest) -> None:
    if payload.suffix and payload.echo:
        raise Refusal(400, "echo and suffix are given; one of them is supported", param="suffix")
    if payload.suffix and payload.truncate_prompt_tokens is not None:
        message = "suffix and truncate_prompt_tokens are given; one of them is supported"
        raise Refusal(400, message, param="truncate_prompt_tokens")
    if payload.best_of is not None and payload.best_of != (payload.n or 1):
        raise Refusal(
            400,
            f"best_of is {payload.best_of}; only n ({payload.n or 1}) is supported",
            param="best_of",
        )
    if _limit(payload) == 0 and not payload.echo:
        raise Refusal(
            400, "max_tokens is 0; it has to be at least 1, or echo true", param="max_tokens"
        )


class CompletionReply:
    """Engine requests and response writer of a completion request."""

    def __init__(
        self,
        service: Service,
        payload: CompletionRequest,
        prompts: list[Prompt],
        model: str,
        call: Call,
    ) -> None:
        self.service, self.payload, self.prompts, self.call = service, payload, prompts, call
        self.tokenizer = service.serving.opened.tokenizer
        self.n = payload.n or 1
        self.top = payload.logprobs
        self.as_ids = payload.return_tokens_as_token_ids is True
        self.limit = _limit(payload)
        self.silent = self.limit == 0  # only the prompt is wanted
        self._texts: dict[int, str] = {}  # of prompts that were given as ids
        self._begun: set[int] = set()  # answers of a stream
        self._offsets: dict[int, TextOffsets] = {}  # by answer, as far as its tokens have come
        self.id, self.model, self.created = f"cmpl-{call.id}", model, int(time.time())

    def requests(self, grammar: Grammar | None) -> list[GenerateRequest]:
        priority, salt = self.payload.priority or 0, self.payload.cache_salt or ""
        return [
            GenerateRequest(prompt.token_ids, self._params(prompt), priority, salt, grammar)
            for prompt in self.prompts
        ]

    def _params(self, prompt: Prompt) -> SamplingParams:
        payload, limit = self.payload, None if self.limit < 0 else max(self.limit, 1)
        most = self.service.most_tokens(limit, len(prompt.token_ids))
        if most is not None and most < self.limit:
            self.call.cut_to = min(most, self.call.cut_to or most)
        # A prompt that fills the context can still be scored, but not continued.
        scored = [payload.prompt_logprobs, self.top if payload.echo else None]
        return SamplingParams(
            **sampling_of(payload, self.service.serving.sampling),
            max_tokens=most,
            logprobs=self.top,
            prompt_logprobs=max((one for one in scored if one is not None), default=None),
        )

    # -- writing ---------------------------------------------------------------------------------

    def whole(self, exchange: Exchange) -> Completion:
        choices = []
        for job in exchange.jobs:
            done = job.answer.result()
            text = "" if self.silent else done.text
            choices.append(self.choice(done, text, self.logprobs(done), whole=True))
            if self.payload.echo:
                self.echo(choices[-1], exchange)
            if (top := self.payload.prompt_logprobs) is not None:
                first = self._first(done.index, exchange)
                choices[-1].prompt_logprobs = prompt_rows(first, top, self.tokenizer)
        document = self.document(choices, self.usage(exchange))
        document.timings = self.timings(exchange)
        if self.payload.return_token_ids:
            document.weights_version = self.service.serving.engine.weights_version()
        return document

    def piece(self, delta: CompletionOutput, exchange: Exchange) -> CompletionChoice | None:
        """A choice of a stream; None while there is only half of a character, or of a stop string."""
        index = delta.index
        first = index not in self._begun
        self._begun.add(index)
        echo = first and bool(self.payload.echo)
        logprobs = self.logprobs(delta)
        choice = self.choice(delta, "" if self.silent else delta.text, logprobs, whole=first)
        if echo:
            self.echo(choice, exchange)
        # A model without a tokenizer never has a text: its tokens are seen by their events alone.
        textless = self.tokenizer is None
        has_content = choice.text or logprobs or self.payload.return_token_ids or textless
        return choice if has_content or delta.finished else None

    def choice(
        self,
        output: CompletionOutput,
        text: str,
        logprobs: CompletionLogprobs | None,
        *,
        whole: bool,
    ) -> CompletionChoice:
        """`whole`: with what is said once, which in a stream is its first piece."""
        written = CompletionChoice(
            index=output.index,
            text=text,
            logprobs=logprobs,
            finish_reason=reason_of(output),
            stop_reason=output.stop_reason,
        )
        if self.payload.return_token_ids:
            written.token_ids = [] if self.silent else output.token_ids
            if whole:
                written.prompt_token_ids = self.prompts[output.index // self.n].token_ids
        return written

    def logprobs(self, output: CompletionOutput) -> CompletionLogprobs | None:
        if self.top is None or output.logprobs is None:
            return None
        offsets = self._answer_offsets(output.index)
        tokens, scores = ([], []) if self.silent else (output.token_ids, output.logprobs)
        return completion_logprobs(tokens, scores, self.top, offsets, self.tokenizer, self.as_ids)

    def _answer_offsets(self, index: int) -> TextOffsets:
        if index not in self._offsets:
            prompt = self.prompts[index // self.n].token_ids
            start = len(self.prompt_text(index)) if self.payload.echo else 0
            skip = self.payload.skip_special_tokens is not False
            self._offsets[index] = TextOffsets(
                self.tokenizer, start=start, after=prompt, skip_special=skip
            )
        return self._offsets[index]

    def _prompt_offsets(self, index: int) -> TextOffsets:
        """A prompt that was given as text has no BOS in it, unless it was written there."""
        prompt, tokenizer = self.prompts[index // self.n], self.tokenizer
        hidden = 0
        if tokenizer is not None and prompt.text is not None and prompt.token_ids:
            first = prompt.token_ids[0]
            special = first in tokenizer.special_ids
            hidden = int(special and not prompt.text.startswith(tokenizer.token(first)))
        return TextOffsets(tokenizer, hidden=hidden)

    def echo(self, choice: CompletionChoice, exchange: Exchange) -> None:
        """The prompt, in front of what the choice has."""
        choice.text = self.prompt_text(choice.index) + choice.text
        first = self._first(choice.index, exchange)
        if choice.logprobs is None or first.prompt_logprobs is None or self.top is None:
            return
        ids = first.request.prompt
        entries = readable_prompt(ids, first.prompt_logprobs, self.tokenizer)
        offsets = self._prompt_offsets(choice.index)
        before = completion_logprobs(ids, entries, self.top, offsets, self.tokenizer, self.as_ids)
        for name in CompletionLogprobs.__struct_fields__:
            setattr(choice.logprobs, name, getattr(before, name) + getattr(choice.logprobs, name))

    def _first(self, index: int, exchange: Exchange) -> Job:
        """The job with the prompt's log probabilities among those of the same prompt."""
        return exchange.jobs[index // self.n * self.n]

    def prompt_text(self, index: int) -> str:
        at = index // self.n
        prompt, tokenizer = self.prompts[at], self.tokenizer
        if prompt.text is not None or tokenizer is None:
            return prompt.text or ""
        if at not in self._texts:
            self._texts[at] = tokenizer.decode(prompt.token_ids, skip_special=False)
        return self._texts[at]

    def usage(self, exchange: Exchange) -> Usage:
        completion_tokens = (
            0 if self.silent else sum(len(job.answer.whole.token_ids) for job in exchange.jobs)
        )
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=CachedTokens(exchange.cached),
        )

    def timings(self, exchange: Exchange) -> dict[str, float]:
        """Timings of the first answer in llama.cpp's format."""
        job = exchange.jobs[0]
        return timings(exchange, job, 0 if self.silent else len(job.answer.whole.token_ids))

    def document(
        self, choices: list[CompletionChoice], usage: Usage | msgspec.UnsetType | None
    ) -> Completion:
        return Completion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )


class ChunkWriter:
    """The chunks of a stream as bytes. Most are nothing but more text, which takes a template and no Struct."""

    def __init__(self, reply: CompletionReply, exchange: Exchange) -> None:
        self.reply, self.exchange = reply, exchange
        payload = reply.payload
        self._usage = None if payload.wants_usage else msgspec.UNSET  # of a chunk that has none
        special = (
            payload.wants_running_usage,
            payload.logprobs is not None,
            payload.return_token_ids,
            payload.timings_per_token,
            reply.silent,
            reply.tokenizer is None,
        )
        self._same = not any(special)
        self._plain: dict[int, Template] = {}  # by choice, after its first chunk

    def write(self, delta: CompletionOutput) -> bytes:
        template = self._plain.get(delta.index)
        if template is None or delta.finish_reason is not None:
            return b"".join(map(event_bytes, self.chunks(delta)))
        return template.fill(delta.text) if delta.text else b""

    def chunks(self, delta: CompletionOutput) -> list[Completion]:
        """Any delta, as the documents that it is."""
        reply, index = self.reply, delta.index
        choice = reply.piece(delta, self.exchange)
        if self._same and index not in self._plain:
            more = CompletionChoice(index=index, text=HOLE)
            self._plain[index] = Template(reply.document([more], self._usage))
        if choice is None:
            return []
        running = reply.payload.wants_running_usage
        usage = reply.usage(self.exchange) if running else self._usage
        chunk = reply.document([choice], usage)
        if reply.payload.timings_per_token or delta.finished:
            chunk.timings = reply.timings(self.exchange)
        return [chunk]

    def last(self) -> bytes:
        reply = self.reply
        if not reply.payload.wants_usage:
            return last_events()
        return last_events(reply.document([], reply.usage(self.exchange)))

    def refused(self, refusal: Refusal) -> bytes:
        return last_events(refusal.body())
