"""POST /tokenize and /detokenize: how this model cuts a text or a conversation into tokens, and back.

Also /v1/chat/completions/input_tokens and /v1/responses/input_tokens, which only count them.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from cairn.models.tokenizer import Tokenizer
from cairn.serve.http.chat.conversation import read_conversation, with_allowed_tools
from cairn.serve.http.chat.structure import offer_of
from cairn.serve.http.endpoints.responses_input import as_chat as responses_chat
from cairn.serve.http.protocol.answers import Detokenized, InputTokens, Piece, Tokenized
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.protocol.requests import ChatRequest, DetokenizeRequest, TokenizeRequest
from cairn.serve.http.protocol.responses import ResponsesRequest
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.service import LONG_TEXT, Service

T = TypeVar("T")

# Longer texts are counted only if the context could hold them: writing the ids of megabytes stops the event loop.
COUNTED_CHARACTERS = 1 << 18


async def tokenize(service: Service, call: Call, body: bytes) -> JSON:
    payload = decode(body, TokenizeRequest)
    service.check_model(payload.model)
    if [payload.prompt, payload.content, payload.messages].count(None) != 2:
        message = "one of prompt, content (as llama.cpp has it) and messages has to be given"
        raise Refusal(400, message, param="prompt")
    for name in ("content", "prompt"):
        text = getattr(payload, name)
        if text is not None and len(text) > COUNTED_CHARACTERS:
            service.check_length(text, name)
    if payload.content is not None:
        ids = await service.encode(payload.content, bool(payload.add_special))
    elif payload.prompt is not None:
        ids = await service.encode(payload.prompt, payload.add_special_tokens is not False)
    else:
        ids = (await read_conversation(service, payload, any_length=True)).token_ids
    names = None
    if payload.return_token_strs:
        names = await _computed(len(ids), lambda: [service.tokenizer.token(id) for id in ids])
    tokens: list[int | Piece] = [*ids]
    if payload.with_pieces:
        tokens = await _computed(len(ids), lambda: _pieces(service.tokenizer, ids))
    context = service.serving.limits.context
    return JSON(Tokenized(count=len(ids), max_model_len=context, tokens=tokens, token_strs=names))


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int | Piece]:
    return [_piece(tokenizer, id) for id in ids]


def _piece(tokenizer: Tokenizer, id: int) -> Piece:
    piece = tokenizer.piece(id)
    if isinstance(piece, bytes):
        try:
            return Piece(id, piece.decode())
        except UnicodeDecodeError:
            return Piece(id, list(piece))
    return Piece(id, tokenizer.decode([id], skip_special=False) if piece is None else piece)


async def chat_input_tokens(service: Service, call: Call, body: bytes) -> JSON:
    """POST /v1/chat/completions/input_tokens: how many tokens the prompt of this chat has."""
    payload = decode(body, ChatRequest)
    service.check_model(payload.model)
    return await _counted(service, payload)


async def responses_input_tokens(service: Service, call: Call, body: bytes) -> JSON:
    """POST /v1/responses/input_tokens"""
    payload = decode(body, ResponsesRequest)
    service.check_model(payload.model)
    sees = service.serving.picture_input is not None
    return await _counted(service, responses_chat(payload, sees=sees))


async def _counted(service: Service, chat: ChatRequest) -> JSON:
    chat = with_allowed_tools(chat)
    offer_of(service, chat)  # refuses tools that could not be used
    prompt = await read_conversation(service, chat, any_length=True)
    return JSON(InputTokens(len(prompt.token_ids)))


async def detokenize(service: Service, call: Call, body: bytes) -> JSON:
    payload = decode(body, DetokenizeRequest)
    service.check_model(payload.model)

    def text() -> str:
        vocabulary, largest = service.serving.limits.vocabulary, max(payload.tokens, default=0)
        if largest >= vocabulary:
            message = f"tokens holds {largest}; token ids go from 0 to {vocabulary - 1}"
            raise Refusal(400, message, param="tokens")
        return service.tokenizer.decode(payload.tokens, bool(payload.skip_special_tokens))

    decoded = await _computed(len(payload.tokens), text)
    return JSON(Detokenized(prompt=decoded, content=decoded))


async def _computed(tokens: int, work: Callable[[], T]) -> T:
    """The result of `work` on so many tokens: beside the event loop, if they are many."""
    return await asyncio.to_thread(work) if tokens > LONG_TEXT else work()
