"""POST /tokenize and /detokenize: how this model cuts a text or a conversation into tokens, and back."""

from cairn.serve.http.chat.conversation import read_conversation
from cairn.serve.http.protocol.answers import Detokenized, Tokenized
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.protocol.requests import DetokenizeRequest, TokenizeRequest
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.service import Service


async def tokenize(service: Service, call: Call, body: bytes) -> JSON:
    asked = decode(body, TokenizeRequest)
    service.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise Refusal(400, "either prompt or messages has to be given", param="prompt")
    if asked.prompt is not None:
        ids = await service.encode(asked.prompt, asked.add_special_tokens is not False)
    else:
        ids = (await read_conversation(service, asked)).token_ids
    names = [service.tokenizer.token(id) for id in ids] if asked.return_token_strs else None
    context = service.serving.limits.context
    return JSON(Tokenized(count=len(ids), max_model_len=context, tokens=ids, token_strs=names))


async def detokenize(service: Service, call: Call, body: bytes) -> JSON:
    asked = decode(body, DetokenizeRequest)
    service.check_model(asked.model)
    vocabulary = service.serving.limits.vocabulary
    wrong = next((id for id in asked.tokens if id >= vocabulary), None)
    if wrong is not None:
        raise Refusal(
            400, f"tokens holds {wrong}; token ids go from 0 to {vocabulary - 1}", param="tokens"
        )
    return JSON(
        Detokenized(service.tokenizer.decode(asked.tokens, bool(asked.skip_special_tokens)))
    )
