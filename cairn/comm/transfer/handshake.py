"""Are the two sides talking about the same cache? Settled before a byte moves.

    hello = version, fingerprint, description | the rest, which only the same version can read

The fingerprint covers what a plan cannot make good: the protocol's version and the cache's contents (model, layers,
heads, width, number type). Tensor parallelism, stages, page sizes and orders may differ. It is compared first; the
description is plain text, so that a refusal can show both sides even when nothing else of a hello can be read. Pure.
"""

import hashlib

import msgspec

from cairn.comm.transfer.errors import TransferRefused
from cairn.comm.transfer.kv import KVContents, KVLayout

VERSION = 1


class EngineHello(msgspec.Struct, frozen=True, array_like=True):
    version: int
    fingerprint: str
    description: str
    rest: bytes


class Side(msgspec.Struct, frozen=True):
    """A rank of an engine and its cache layout."""

    engine: str  # unique: a restarted engine has another
    rank: int
    layout: KVLayout


def fingerprint(contents: KVContents, version: int = VERSION) -> str:
    canonical = msgspec.json.encode([version, contents], order="sorted")
    return hashlib.sha256(canonical).hexdigest()[:32]


def describe(side: Side, version: int = VERSION) -> str:
    layout = side.layout
    return f"version {version}: {layout.contents.words()} ({layout.words()}; {side.engine} rank {side.rank})"


def say_hello(side: Side, version: int = VERSION) -> bytes:
    rest = msgspec.msgpack.encode(side)
    hello = EngineHello(
        version, fingerprint(side.layout.contents, version), describe(side, version), rest
    )
    return msgspec.msgpack.encode(hello)


def judge(ours: Side, greeting: bytes) -> Side:
    """The other side, or Refused with both descriptions."""
    try:
        hello = msgspec.msgpack.decode(greeting, type=EngineHello)
    except msgspec.MsgspecError:
        raise TransferRefused(
            f"the other side says something else than hello; here: {describe(ours)}",
            hint="is it an engine of another kind, or of a much older version?",
        ) from None
    mine = fingerprint(ours.layout.contents)
    if (hello.version, hello.fingerprint) != (VERSION, mine):
        raise TransferRefused(
            f"incompatible caches. here: {describe(ours)}; there: {hello.description}",
            hint="serve the same model, KV dtype and version of Cairn on both sides; "
            "parallelism and page sizes may differ",
        )
    try:
        return msgspec.msgpack.decode(hello.rest, type=Side)
    except msgspec.MsgspecError as error:
        raise TransferRefused(
            f"the hello of {hello.description} cannot be read: {error}",
            hint="update the older side",
        ) from None
