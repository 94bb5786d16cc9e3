"""Whom a chat talks to: any OpenAI-compatible server by its URL.

    messages --POST /v1/chat/completions, stream--> Piece, Piece, ..., Ending

`Talker` is what a chat needs of its other side; `chat_local` has the one that runs a model in this process. What a
server refuses becomes an error with its own words and what to do about it. Leaving the iterator closes the connection,
which ends the request on the server. Knows nothing about terminals.
"""

import http.client
import ssl
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from cairn.bench.http_reader import EventReader, ProtocolError
from cairn.bench.load_answer import error_text
from cairn.cli.chat.chat_state import Message, Sampling
from cairn.core.errors import CairnError, UsageError
from cairn.core.server_address import place

READ_BYTES = 64 * 1024
CONNECT_S = 10.0
DOWN = "is it running? `cairn serve` starts one"


class Piece(NamedTuple):
    """Some text of an answer."""

    text: str
    kind: Literal["answer", "reasoning"] = "answer"


class Ending(NamedTuple):
    """Why an answer is over, and what was counted; None: unknown."""

    finish: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None


class Talker(Protocol):
    model: str
    notes: Sequence[str]  # what a person may want to know about it

    def models(self) -> list[str]: ...

    def use(self, model: str) -> None:
        """Talk to another model from now on."""
        ...

    def answer(
        self, messages: Sequence[Message], sampling: Sampling
    ) -> Generator[Piece | Ending, None, None]: ...

    def close(self) -> None: ...


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None  # of an answer that is no stream
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class ServerTalker:
    """A server that is reached over HTTP. `model` may be empty: then its first one is taken."""

    notes: Sequence[str] = ()

    def __init__(
        self, url: str, model: str = "", key: str | None = None, timeout_s: float = 600.0
    ) -> None:
        self.url, self.model = url, model
        self._place = place(url)
        self._key, self._timeout_s = key, timeout_s
        if key is not None and (not key.isascii() or not key.isprintable()):
            raise UsageError("the API key has characters that no header can hold", hint="check it")
        if not model:
            found = self.models()
            if not found:
                raise CairnError(f"{url} names no model", hint="name one: cairn chat MODEL --url")
            self.model = found[0]

    def models(self) -> list[str]:
        connection = self._open()
        try:
            response = self._ask(connection, "GET", "/v1/models", None)
            return [one.id for one in msgspec.json.decode(response.read(), type=_Models).data]
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise CairnError(
                f"{self.url}/v1/models is no list of models", hint="does it speak OpenAI's API?"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._cut(error) from None
        finally:
            connection.close()

    def use(self, model: str) -> None:
        found = self.models()
        if model not in found:
            raise UsageError(
                f"{self.url} has no model {model!r}", hint=f"there are: {', '.join(found)}"
            )
        self.model = model

    def answer(
        self, messages: Sequence[Message], sampling: Sampling
    ) -> Generator[Piece | Ending, None, None]:
        body = {
            "model": self.model,
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True},
        } | sampling.given()
        connection = self._open()
        try:
            response = self._ask(
                connection, "POST", "/v1/chat/completions", msgspec.json.encode(body)
            )
            kind = response.headers.get_content_type()
            yield from _read(
                _events(response) if kind == "text/event-stream" else [response.read()]
            )
        except (ProtocolError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CairnError(
                f"{self.url} answers something else than OpenAI's API: {error}"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise self._cut(error) from None
        finally:
            connection.close()

    def close(self) -> None:
        """Nothing is kept open between two answers."""

    def _open(self) -> http.client.HTTPConnection:
        host, port, tls, _ = self._place
        if tls:
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=context)
        return http.client.HTTPConnection(host, port, timeout=CONNECT_S)

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None
    ) -> http.client.HTTPResponse:
        headers = {"accept": "*/*"}
        if body is not None:
            headers["content-type"] = "application/json"
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        try:
            connection.connect()
        except OSError as error:
            raise CairnError(
                f"cannot reach {self.url}: {error.strerror or error}", hint=DOWN
            ) from None
        assert connection.sock is not None
        connection.sock.settimeout(self._timeout_s)
        connection.request(method, self._place.prefix + path, body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise self._refused(response)
        return response

    def _refused(self, response: http.client.HTTPResponse) -> CairnError:
        said = error_text(response.read(READ_BYTES))
        wait = response.headers.get("retry-after")
        after = f"in {wait} s" if wait and wait.isdecimal() else "in a moment"
        hint = {
            400: "if the chat is too long, /undo and /clear make it shorter",
            401: "set CAIRN_API_KEY or OPENAI_API_KEY to a key that this server knows",
            403: "this key may not do that; another one goes into CAIRN_API_KEY",
            404: f"is {self.model!r} there? /model shows what the server has"
            if self.model
            else "is this the base of OpenAI's API? Such as http://127.0.0.1:8000",
            429: f"it is busy: try again {after}",
            503: f"it takes no requests now: try again {after}",
        }.get(response.status, "the log of the server may say more")
        return CairnError(f"{self.url} answered {response.status}: {said}", hint=hint)

    def _cut(self, error: Exception) -> CairnError:
        if isinstance(error, TimeoutError):
            return CairnError(
                f"{self.url} said nothing for {self._timeout_s:g} s", hint="--timeout allows more"
            )
        reason = str(error) or type(error).__name__
        return CairnError(
            f"the connection to {self.url} ended before the answer did ({reason})",
            hint="try again",
        )


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    reader = EventReader()
    while data := response.read1(READ_BYTES):
        yield from reader.feed(data)


def _read(events: Iterator[bytes] | list[bytes]) -> Iterator[Piece | Ending]:
    """Convert events to pieces; the ending comes last."""
    finish, usage = None, _Usage()
    for event in events:
        if event == b"[DONE]":
            break
        found = msgspec.json.decode(event, type=_Event)
        if found.error is not None:
            raise CairnError(
                f"the server failed: {error_text(msgspec.json.encode({'error': found.error}))}",
                hint="try again",
            )
        usage = found.usage or usage
        for choice in found.choices[:1]:
            delta = choice.delta or choice.message or _Delta()
            thought = delta.reasoning_content or delta.reasoning
            if thought:
                yield Piece(thought, "reasoning")
            if delta.content:
                yield Piece(delta.content)
            finish = choice.finish_reason or finish
    if finish is None:
        raise CairnError("the answer was cut short by the server", hint="try again")
    yield Ending(finish, usage.prompt_tokens, usage.completion_tokens)
