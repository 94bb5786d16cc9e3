"""Evidence from any OpenAI-compatible server: log-probabilities of texts and of a chat, over HTTP.

    /v1/completions  echo, logprobs      every token of a text, where the server gives those of a prompt
    /v1/completions  logprobs            else the greedy tokens behind each text
    /v1/chat/completions logprobs        a greedy answer, through the server's own template

A server gives tokens as texts; ids are found by the vocabulary of the model. A text that several ids share is left
out, and a place with it where it is the likeliest. A token that no id has ends the reading of that answer.
"""

import http.client
import json
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cairn.bench.load_answer import error_text
from cairn.core.errors import CairnError, system_words
from cairn.core.server_address import place
from cairn.models.tokenizer import Tokenizer
from cairn.verify.evidence import ModelEvidence, Observation, Row
from cairn.verify.probes import CHAT, CHAT_PROBE, LONG_ANSWER, TOP, VerifyProbe

TIMEOUT_S = 300.0
Spelled = dict[bytes, float]  # log-probabilities by the bytes of a token
LEAST = -1000.0  # what stands for minus infinity where JSON has none


class ServerRefused(CairnError):
    """The server does not offer this."""


class OtherTokenizer(CairnError):
    """The server reads texts as other tokens than the model does: it serves another model."""

    exit_status = 1  # as a verdict "differs"


class ServerClient:
    """Client of a server that sends one request at a time."""

    def __init__(self, url: str, model: str = "", key: str | None = None) -> None:
        self.url, self._place, self._key = url, place(url), key
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        listed = self.ask("GET", "/v1/models", None).get("data")
        names = [one.get("id") for one in listed or [] if isinstance(one, dict)]
        if not names:
            raise CairnError(f"{self.url} names no model", hint="name one with --served-model")
        return str(names[0])

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        host, port, tls, prefix = self._place
        if tls:
            context = ssl.create_default_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=TIMEOUT_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        headers = {"content-type": "application/json"}
        if self._key:
            headers["authorization"] = f"Bearer {self._key}"
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, prefix + path, data, headers)
            response = connection.getresponse()
            said = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise CairnError(
                f"cannot ask {self.url}{path}: {system_words(error)}",
                hint="is the server running, and the address right?",
            ) from None
        finally:
            connection.close()
        return self._read(path, response.status, said)

    def _read(self, path: str, status: int, said: bytes) -> dict[str, Any]:
        if status in (401, 403):
            hint = "set CAIRN_API_KEY or OPENAI_API_KEY to a key that this server knows"
            raise CairnError(f"{self.url} answered {status}: {error_text(said)}", hint=hint)
        if status != 200:
            raise ServerRefused(f"{self.url}{path} answered {status}: {error_text(said)}")
        try:
            found = json.loads(said)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise CairnError(f"{self.url}{path} answers something else than OpenAI's API")
        return found


def from_server(
    server: ServerClient,
    probes: Sequence[VerifyProbe],
    tokenizer: Tokenizer,
    watch: Callable[[str], None] = lambda said: None,
) -> ModelEvidence:
    ids = TokenIds(tokenizer)
    observations, refusals = [], []
    for number, probe in enumerate(probes, 1):
        watch(f"the server answers fixed prompt {number} of {len(probes)} ({probe.name})")
        try:
            ask = _chat if probe.name == CHAT_PROBE else _text
            observations.append(ask(server, probe, ids))
        except ServerRefused as error:
            refusals.append(error.message)
    if not any(any(one.rows) for one in observations):
        reason = refusals[0] if refusals else "its answers have no log-probabilities"
        hint = "log-probabilities have to be on: llama-cpp-python's server wants --logits_all true"
        raise CairnError(f"{server.url} cannot be verified: {reason}", hint=hint)
    return ModelEvidence(
        model=server.model, source=f"the server {server.url}", observations=observations
    )


class TokenIds:
    """Ids of tokens by their bytes. Two ids with the same bytes cannot be told apart, so neither is used."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._by_bytes: dict[bytes, int | None] = {}
        for id in range(tokenizer.vocab_size):
            piece = tokenizer.piece(id)
            if piece is not None:
                key = piece if isinstance(piece, bytes) else piece.encode()
                self._by_bytes[key] = None if key in self._by_bytes else id

    def of(self, spelled: bytes) -> int | None:
        found = self._by_bytes.get(spelled)
        return found if found is not None else self._named(spelled.decode("utf-8", "replace"))

    def _named(self, text: str) -> int | None:
        """Token id from `token_id:N` or from the spelling in the vocabulary, which special tokens need."""
        if text.startswith("token_id:") and text[9:].isdecimal():
            return int(text[9:])
        return self.tokenizer.backend.token_to_id(text)

    def row(self, spelled: Spelled | None, known: Mapping[bytes, int] = {}) -> Row:
        """`known`: ids of tokens that need not be told by their bytes.

        Empty where the likeliest token cannot be told: it is unknown whether it is the expected one.
        """
        if not spelled:
            return {}
        ids = {token: known.get(token, self.of(token)) for token in spelled}
        if ids[max(spelled, key=spelled.__getitem__)] is None:
            return {}
        found = ((ids[token], float(value)) for token, value in spelled.items())
        return {id: value for id, value in found if id is not None and value > LEAST}


def _text(server: ServerClient, probe: VerifyProbe, ids: TokenIds) -> Observation:
    body = {
        "model": server.model,
        "prompt": probe.text,
        "max_tokens": max(probe.answer, 1),
        "temperature": 0,
        "logprobs": TOP,
    }
    try:
        found = _completion(server.ask("POST", "/v1/completions", body | {"echo": True}))
    except ServerRefused:
        found = ServerTokens([], [])
    if len(found.tokens) > max(probe.answer, 1):  # some servers take `echo` and do without
        return _echoed(probe, found, ids)
    if probe.answer:
        body["max_tokens"] = LONG_ANSWER
    return _continued(probe, _completion(server.ask("POST", "/v1/completions", body)), ids)


class ServerTokens(NamedTuple):
    """Tokens returned by a server: their spelling, and their log probabilities (None without a context)."""

    tokens: list[bytes]
    rows: list[Spelled | None]


def _completion(answer: dict[str, Any]) -> ServerTokens:
    choice = (answer.get("choices") or [{}])[0]
    logprobs = choice.get("logprobs") or {}
    if "content" in logprobs:  # the chat's form, which some servers use everywhere
        return _content(logprobs["content"] or [])
    tokens = [str(token).encode() for token in logprobs.get("tokens") or []]
    tops = logprobs.get("top_logprobs") or [None] * len(tokens)
    values = logprobs.get("token_logprobs") or [None] * len(tokens)
    rows: list[Spelled | None] = []
    for token, top, value in zip(tokens, tops, values, strict=False):
        row = {text.encode(): likely for text, likely in (top or {}).items()}
        if row.get(token, value) != value:  # half of a character: another token has the same text
            row = None
        rows.append(None if value is None or row is None else {**row, token: value})
    return ServerTokens(tokens, rows)


def _content(content: Sequence[Mapping[str, Any]]) -> ServerTokens:
    tokens = [_spelling(one) for one in content]
    rows: list[Spelled | None] = []
    for token, one in zip(tokens, content, strict=True):
        row = {_spelling(top): top.get("logprob", LEAST) for top in one.get("top_logprobs") or []}
        rows.append({**row, token: one.get("logprob", LEAST)})
    return ServerTokens(tokens, rows)


def _spelling(one: Mapping[str, Any]) -> bytes:
    """Bytes of a token if the server returns them; its text may lack a space or part of a character."""
    raw = one.get("bytes")
    return bytes(raw) if raw else str(one.get("token", "")).encode()


def _echoed(probe: VerifyProbe, found: ServerTokens, ids: TokenIds) -> Observation:
    """The tokens of the prompt are known: those of the answer behind it are read from their texts."""
    tokens, rows = found
    prompt = len(probe.ids)
    hidden = _hidden(probe, tokens, ids)
    _check_tokens(probe, tokens, hidden, ids)
    answer = _read_ids(tokens[prompt - hidden :][: probe.answer], ids)
    every = [*probe.ids, *answer]
    scored = []
    for at in range(probe.first, len(every)):
        spelled = rows[at - hidden] if at - hidden >= 0 else None
        scored.append(ids.row(spelled, {tokens[at - hidden]: every[at]}))
    return Observation(probe.name, every, probe.first, scored)


def _check_tokens(probe: VerifyProbe, tokens: Sequence[bytes], hidden: int, ids: TokenIds) -> None:
    """Single tokens may be spelled in ways that no id has; most of them are what the model reads."""
    told = [
        (found, id, at)
        for at, (token, id) in enumerate(zip(tokens, probe.ids[hidden:], strict=False), hidden)
        if (found := ids.of(token)) is not None
    ]
    other = [at for found, id, at in told if found != id]
    if len(tokens) + hidden >= len(probe.ids) and 2 * len(other) <= len(told):
        return
    at = other[0] if other else len(tokens) + hidden
    raise OtherTokenizer(
        f"the server reads the text {probe.name!r} as other tokens than the model: they differ from token {at} on",
        hint="it serves another model or tokenizer; name the files of what it serves: cairn verify MODEL --url URL",
    )


def _hidden(probe: VerifyProbe, tokens: Sequence[bytes], ids: TokenIds) -> int:
    """Number of tokens that the server omits from its echo; begin-of-text has no text."""
    bos = ids.tokenizer.bos_id
    second = probe.ids[1] if len(probe.ids) > 1 else None
    starts = bos is not None and probe.ids[:1] == [bos]
    return int(starts and ids.of(tokens[0]) not in (bos, None) and ids.of(tokens[0]) == second)


def _read_ids(tokens: Sequence[bytes], ids: TokenIds) -> list[int]:
    """Up to the first token that cannot be told."""
    read: list[int] = []
    for token in tokens:
        id = ids.of(token)
        if id is None:
            break
        read.append(id)
    return read


def _continued(probe: VerifyProbe, found: ServerTokens, ids: TokenIds) -> Observation:
    answer = _read_ids(found.tokens, ids)
    rows = [ids.row(row) for row in found.rows[: len(answer)]]
    return Observation(probe.name, [*probe.ids, *answer], len(probe.ids), rows)


def _chat(server: ServerClient, probe: VerifyProbe, ids: TokenIds) -> Observation:
    body = {
        "model": server.model,
        "messages": CHAT,
        "max_tokens": probe.answer,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": TOP,
    }
    found = _completion(server.ask("POST", "/v1/chat/completions", body))
    return _continued(probe, found, ids)
