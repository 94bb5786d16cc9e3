"""Request paths that make a server compute, which are queued and metered; others are forwarded at once."""

from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

GENERATING = frozenset(
    (
        b"/v1/chat/completions",
        b"/v1/completions",
        b"/v1/messages",
        b"/v1/responses",
        b"/completion",
        b"/infill",
        b"/api/chat",
        b"/api/generate",
    )
)
COMPUTING = GENERATING | {
    b"/v1/embeddings",
    b"/v1/rerank",
    b"/v2/rerank",
    b"/rerank",
    b"/v1/score",
    b"/score",
    b"/classify",
    b"/embed",
    b"/v2/embed",
    b"/api/embed",
    b"/api/embeddings",
    b"/v1/audio/transcriptions",
    b"/v1/audio/translations",
    b"/cairn/prefill",
}


STREAMING = frozenset((b"/api/chat", b"/api/generate"))  # unless the body says no


class PathKind(NamedTuple):
    """Properties of a path."""

    computes: bool
    generates: bool
    streams: bool = False


@lru_cache(256)  # the same few in every request
def kind_of(target: bytes) -> PathKind:
    """`target`: a path with what may stand behind it."""
    plain = plain_path(target.partition(b"?")[0])
    return PathKind(plain in COMPUTING, plain in GENERATING, plain in STREAMING)


def plain_path(path: bytes) -> bytes:
    """Normalise a path as a server interprets it."""
    if not path.startswith(b"/"):  # http://HOST/PATH
        path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
    return unquote_to_bytes(path) if b"%" in path else path
