"""Reads the stream of an OpenAI-compatible server as it arrives, and records when each token came.

    due     sent        first token                         last token  end
    |-------|-----------|--------|--------|--------|--------|-----------|
      lag                 gap      gap      gap      gap
    |<------ TTFT ----->|
                        |<- TPOT = this / (tokens - 1) ---->|
    |<------------------------------ E2E ------------------------------>|

Times count from the moment at which a request was due, not from when the client sent it: a client or a
limit on connections that is late must not make a server look fast (coordinated omission). How many tokens there were is
what the server says (`usage`); where it says nothing, its events are counted. Pure: no socket, no clock.
"""

from typing import Any

import msgspec

KINDS = {
    "refused": "no connection to the server",
    "client": "this side ran out of files or ports; see `ulimit -n`",
    "timeout": "no complete answer in time",
    "closed": "the connection ended before the answer did",
    "cut short": "the stream ended without a reason to finish",
    "error event": "the server reported an error within the stream",
    "bad answer": "what came is no stream of completions",
    "http NNN": "the server answered with this status",
}  # of errors


class RequestRecord(msgspec.Struct, kw_only=True):
    """Timestamps of a request in seconds of one clock."""

    due_s: float
    sent_s: float
    end_s: float
    first_s: float | None = None
    last_s: float | None = None
    chunk_s: list[float] = []  # when each event with tokens came
    asked_tokens: int = 0
    input_tokens: int | None = None  # as the server counts
    cached_tokens: int | None = None  # of the input
    output_tokens: int = 0
    finish: str | None = None
    error: str | None = None  # one of KINDS
    detail: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        if self.first_s is None or self.last_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Between one event with tokens and the next."""
        return [
            later - earlier for earlier, later in zip(self.chunk_s, self.chunk_s[1:], strict=False)
        ]


def since(record: RequestRecord, begin_s: float) -> RequestRecord:
    """The same with its times counted from another moment."""

    def moved(moment: float | None) -> float | None:
        return None if moment is None else moment - begin_s

    return msgspec.structs.replace(
        record,
        due_s=record.due_s - begin_s,
        sent_s=record.sent_s - begin_s,
        end_s=record.end_s - begin_s,
        first_s=moved(record.first_s),
        last_s=moved(record.last_s),
        chunk_s=[moment - begin_s for moment in record.chunk_s],
    )


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None  # a sentence or an object, in many forms


_decode = msgspec.json.Decoder(_Event).decode


class LoadAnswer:
    """Takes the events of one stream and becomes a Record."""

    def __init__(self) -> None:
        self.chunk_s: list[float] = []
        self.usage: _Usage | None = None
        self.finish: str | None = None
        self.finish_s: float | None = None
        self.error: tuple[str, str] | None = None  # kind, detail

    def take(self, event: bytes, now: float) -> None:
        if event == b"[DONE]" or self.error is not None:
            return
        try:
            decoded = _decode(event)
        except msgspec.DecodeError as error:
            self.error = ("bad answer", f"{error}: {event[:120]!r}")
            return
        if decoded.error is not None:
            self.error = ("error event", error_text(msgspec.json.encode({"error": decoded.error})))
            return
        if decoded.usage is not None:
            self.usage = decoded.usage
        if any(map(_has_tokens, decoded.choices)):
            self.chunk_s.append(now)
        for choice in decoded.choices:
            if choice.finish_reason is not None:
                self.finish, self.finish_s = choice.finish_reason, now

    def record(self, due_s: float, sent_s: float, end_s: float, asked_tokens: int) -> RequestRecord:
        error = self.error
        if error is None and self.finish is None:
            error = ("cut short", f"after {len(self.chunk_s)} events with tokens")
        usage = self.usage or _Usage()
        output = usage.completion_tokens
        chunks = self.chunk_s
        if self.finish_s is not None and output == len(chunks) + 1:
            # The last token has no text (an end of text, half a character): it came with the reason to finish.
            chunks = [*chunks, self.finish_s]
        elif not chunks and output and self.finish_s is not None:
            chunks = [self.finish_s]
        details = usage.prompt_tokens_details
        return RequestRecord(
            due_s=due_s,
            sent_s=sent_s,
            end_s=end_s,
            first_s=chunks[0] if chunks else None,
            last_s=chunks[-1] if chunks else None,
            chunk_s=chunks,
            asked_tokens=asked_tokens,
            input_tokens=usage.prompt_tokens,
            cached_tokens=details.cached_tokens if details is not None else None,
            output_tokens=len(chunks) if output is None else output,
            finish=self.finish,
            error=error[0] if error is not None else None,
            detail=error[1] if error is not None else None,
        )


def _has_tokens(choice: _Choice) -> bool:
    """Return whether an event carries tokens.

    A chat event may carry only the role. Every completion event before the last one carries tokens, even if its text
    is empty because the character is incomplete.
    """
    if choice.delta is not None:
        return bool(choice.delta)
    return bool(choice.text) or (choice.text is not None and choice.finish_reason is None)


class _Message(msgspec.Struct):
    message: str | None = None


class _Refusal(msgspec.Struct):
    error: _Message | str | None = None
    message: str | None = None
    detail: str | None = None


def error_text(body: bytes, most: int = 300) -> str:
    """The sentence in the body of an error, or its beginning."""
    for shape in (_Refusal, _Message):
        try:
            decoded = msgspec.json.decode(body, type=shape)
        except msgspec.DecodeError:
            continue
        inner = getattr(decoded, "error", None)
        text = inner.message if isinstance(inner, _Message) else inner
        text = text or decoded.message or getattr(decoded, "detail", None)
        if text:
            return text[:most]
    return body[:most].decode("utf-8", "replace").strip() or "(an empty body)"
