"""Messages of a KV-cache hand-over, and the offer that a router passes from prefill to decode.

    receiver -> sender   Beat    I hold these requests, I am done with those
    sender -> receiver   Answer  these are yours (so many layers or tokens are ready), those are gone, those are closed
    sender -> receiver   Ready   one more layer, or further tokens, of this request
    sender -> receiver   Begun   what you wait for is being computed, and can be read as it becomes ready

A beat says everything anew, so a note that is lost, late, doubled or out of order does no harm. Types only.
"""

import msgspec

from cairn.comm.transfer.errors import TransferError
from cairn.comm.transfer.kv import KVLayout


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a sequence that an engine has computed or is about to compute, for the receiver."""

    request: str  # never used for another sequence
    engine: str
    layout: KVLayout
    addresses: list[str]  # of each rank of the sender
    table: list[int]  # its pages, the same on each rank
    tokens: int
    streamed: bool = False  # layers become ready one after another
    chunked: bool = False  # tokens become ready, all layers of a chunk at a time


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    number: int
    holders: int  # ranks that will read
    holding: list[str]
    done: list[str]


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    number: int
    granted: dict[str, int]  # request -> layers, or tokens of a chunked offer, that are ready
    gone: list[str]
    closed: list[str]


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    request: str
    count: int  # layers, or tokens of a chunked offer


class Begun(msgspec.Struct, frozen=True, array_like=True, tag="begun"):
    reader: str  # what the receiver calls it
    offer: Offer


Said = Beat | Answer | Ready | Begun


def encode(note: Said) -> bytes:
    return msgspec.msgpack.encode(note)


def decode(payload: bytes) -> Said:
    try:
        return msgspec.msgpack.decode(payload, type=Said)
    except msgspec.MsgspecError as error:
        raise TransferError(f"a note that cannot be read: {error}") from None
