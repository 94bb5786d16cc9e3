"""POST /cairn/prefill: a prompt is computed here, and goes on in the decode server that asks. For `--role prefill`.

    Ask --one token, pages on offer--> Handoff | Ended        both in MessagePack, see `serve/separation`

The pages are read over the transfer (`--kv-transport`), not over HTTP, those of a prompt in several chunks from the
first chunk on if the other side is connected there. They are freed when the other side has read
them, has died, or has not come in time.
"""

import msgspec
from starlette.responses import Response

from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.exchange import Exchange
from cairn.serve.http.server.service import Service
from cairn.serve.separation.prefill import Ask, Ended, Handoff
from cairn.serve.separation.prefill_client import MEDIA_TYPE, decode_reply
from cairn.serve.serving import GenerateRequest

decode_ask = msgspec.msgpack.Decoder(Ask).decode


async def prefill(service: Service, call: Call, body: bytes) -> Response:
    try:
        ask = decode_ask(body)
    except msgspec.MsgspecError as error:
        raise Refusal(400, f"the body is no request of a decode server: {error}") from None
    request = GenerateRequest(ask.prompt, ask.params, ask.priority, ask.salt, reader=ask.reader)
    exchange = Exchange(service, call, [request], None)
    async with exchange:
        await exchange.finish()
        handoff = exchange.jobs[0].request.handoff
        if not handoff:
            raise Refusal(503, "the request was ended before its prompt was computed")
        renamed = _named(decode_reply(handoff), ask.id)
        return Response(msgspec.msgpack.encode(renamed), media_type=MEDIA_TYPE)


def _named(reply: Handoff | Ended, id: str) -> Handoff | Ended:
    """Under the id that the decode server knows."""
    if isinstance(reply, Handoff):
        ask = msgspec.structs.replace(reply.ask, id=id)
        return msgspec.structs.replace(reply, ask=ask)
    return msgspec.structs.replace(reply, id=id)
