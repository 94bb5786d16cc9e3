"""One turn of a conversation for the interfaces that give a single answer: /v1/messages and /v1/responses.

    ChatRequest -prepare-> Turn: prompt, parameters, grammar  ->  jobs
    text of the answer -Blocks-> thought | text | tool call, each begun, continued, ended

Those interfaces name everything in their own words, translate what they are asked into a chat request, and write what
becomes of a `Block`. What shape an answer has is decided here as it is for chat: by `structure` and `reader`.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec

from cairn.serve.answer import CompletionOutput
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine_thread import Job
from cairn.serve.grammar import Grammar
from cairn.serve.guide import Guide
from cairn.serve.http.chat.conversation import read_conversation
from cairn.serve.http.chat.reader import Reader, keeps_marks, make_readers
from cairn.serve.http.chat.structure import grammar_for, offer_of, thinking_of
from cairn.serve.http.endpoints.completions import reason_of
from cairn.serve.http.protocol.protocol_answers import ChatDelta, Reason
from cairn.serve.http.protocol.protocol_requests import ChatRequest
from cairn.serve.http.protocol.protocol_sampling import sampling_of
from cairn.serve.http.server.service import Service
from cairn.serve.prompts import Prompt

Kind = Literal["thought", "text", "call"]


class Block(msgspec.Struct, kw_only=True):
    """A part of the answer that is one thing; `text` grows."""

    index: int
    kind: Kind
    text: str = ""  # of a call: its arguments
    id: str = ""  # of a call
    name: str = ""  # of the tool that is called


class Change(NamedTuple):
    what: Literal["begin", "more", "end"]
    block: Block
    text: str = ""  # what is new


class Blocks:
    """An answer while it grows, as blocks one behind the other. There is always at least one."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._call: int | None = None  # of the block that is open: which of the reader's calls
        self.all: list[Block] = []

    def push(self, delta: CompletionOutput) -> list[Change]:
        changes: list[Change] = []
        for part in self._reader.push(delta.text, delta.finished):
            self._take(part, changes)
        if delta.finished:
            if not self.all:
                self._begin(Block(index=0, kind="text"), changes)
            changes.append(Change("end", self.all[-1]))
        return changes

    def reason(self, delta: CompletionOutput) -> Reason | None:
        return self._reader.reason(reason_of(delta))

    def _take(self, part: ChatDelta, changes: list[Change]) -> None:
        if part.reasoning_content:
            self._say("thought", part.reasoning_content, changes)
        if part.content:
            self._say("text", part.content, changes)
        for call in part.tool_calls or ():
            function = call.function
            if function is None:
                continue
            if call.index != self._call or call.id is not None:
                made = Block(
                    index=len(self.all), kind="call", id=call.id or "", name=function.name or ""
                )
                self._begin(made, changes)
                self._call = call.index
            self._more(function.arguments or "", changes)

    def _say(self, kind: Kind, text: str, changes: list[Change]) -> None:
        if not self.all or self.all[-1].kind != kind:
            self._begin(Block(index=len(self.all), kind=kind), changes)
        self._more(text, changes)

    def _begin(self, block: Block, changes: list[Change]) -> None:
        if self.all:
            changes.append(Change("end", self.all[-1]))
        self._call = None
        self.all.append(block)
        changes.append(Change("begin", block))

    def _more(self, text: str, changes: list[Change]) -> None:
        if text:
            self.all[-1].text += text
            changes.append(Change("more", self.all[-1], text))


class Turn(NamedTuple):
    service: Service
    prompt: Prompt
    params: SamplingParams
    grammar: Grammar | None
    blocks: Blocks

    def jobs(self, on_news: Callable[[Job], None]) -> list[Job]:
        return self.service.backend.jobs(
            self.prompt.token_ids, self.params, on_news, grammar=self.grammar
        )


async def prepare(
    service: Service, chat: ChatRequest, most: int | None, guide: Guide | None
) -> Turn:
    """`most`: tokens of the answer; `guide`: the shape that was asked for."""
    offer = offer_of(service, chat)
    prompt = await read_conversation(service, chat)
    thinking = thinking_of(service, prompt.text or "")
    grammar = await grammar_for(service, guide, offer, thinking)
    largest, room = service.config.max_request_tokens, service.backend.limits.context
    if largest is not None:
        most = min(most or max(1, room - len(prompt.token_ids)), largest)
    params = SamplingParams(**sampling_of(chat), max_tokens=most)
    guided = grammar is not None
    if keeps_marks(service.tokenizer, offer, thinking, guided):
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    [reader] = make_readers(offer, thinking, guided, 1)
    return Turn(service, prompt, params, grammar, Blocks(reader))
