"""A prompt as a chain of keys that a router and a server compute alike, without tokenizing.

    parts   system | user ........................ | assistant ...      the texts of a request's body, in order
    keys          k1        k2        k3          k4            k5      at every KiB of a part, and at its end

Each key is a hash of everything before its boundary: equal keys mean equal beginnings. The server, which tokenizes
anyway, says which of its pages ends at which key (`token_counts`); the router compares numbers. A prompt that is given
as token ids has a key at every 64 tokens; a picture counts by its digest. Pure; what a chat template makes of the texts
is not known here.
"""

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import accumulate
from struct import Struct
from typing import Any

import msgspec

CHUNK_BYTES = 1024
CHUNK_TOKENS = 64
LONG_CONTENT = 2048  # bytes of a list of parts that may hold a picture
LONG_TOOLS = 1 << 16  # bytes; a thousand tools of a body's size would be gigabytes
MOST_WANTED = 1 << 20  # tokens of an answer that are believed, whatever a request says
TOKEN_BYTES = 4  # assumed for a token where none were counted
_KEY = Struct("<Q8x").unpack
_BACKSLASH = ord("\\")  # a number is found in bytes in a fifth of the time of a byte string
_NOTHING = msgspec.Raw(b"")
_decode_text = msgspec.json.Decoder().decode
_PLAIN_HEADS = {role: role.encode() + b"\0\0\0" for role in ("user", "assistant", "system", "tool")}


class Message(msgspec.Struct, gc=False):
    role: str = ""
    content: msgspec.Raw = _NOTHING
    tool_calls: msgspec.Raw = _NOTHING
    name: msgspec.Raw = _NOTHING


class RequestFields(msgspec.Struct, gc=False):
    """The few fields of a body that say what is computed; of every protocol that the server speaks."""

    model: str | None = None
    messages: list[Message] | None = None
    prompt: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    system: msgspec.Raw = _NOTHING
    instructions: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    cache_salt: str | None = None
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    priority: int | None = None
    user: msgspec.Raw = _NOTHING
    n: int | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """Requested answer length, at most MOST_WANTED; None if unspecified."""
        wanted = self.max_completion_tokens or self.max_tokens or self.max_output_tokens
        return wanted if wanted is None or wanted < MOST_WANTED else MOST_WANTED


_decode_fields = msgspec.json.Decoder(RequestFields).decode
_LONG_BASE64 = re.compile(rb"[A-Za-z0-9+/=\\]{1024,}")


def read_fields(body: bytes) -> RequestFields:
    """Pictures inside of messages are replaced by their digests: they are hashed once, and have no keys inside."""
    fields = _decode_fields(body)
    if len(body) <= LONG_CONTENT:
        return fields
    for message in fields.messages or ():
        if len(message.content) > LONG_CONTENT and memoryview(message.content)[:1] == b"[":
            message.content = msgspec.Raw(_LONG_BASE64.sub(_digest, bytes(message.content)))
    return fields


def _digest(run: re.Match[bytes]) -> bytes:
    return b"blake2b:" + blake2b(run[0], digest_size=16).hexdigest().encode()


class PromptKeys(msgspec.Struct, gc=False):
    """`keys[i]` stands for the first `tokens[i]` tokens; those of texts are estimated."""

    keys: list[int]
    tokens: list[int]
    parts: list[bytes]  # the texts; empty where the prompt is given as ids
    length: int  # of the whole prompt, in tokens; estimated for texts

    @property
    def by_ids(self) -> bool:
        return not self.parts and bool(self.length)


def prompt_keys(fields: RequestFields) -> PromptKeys:
    """Keys of a single prompt; several prompts in one request have none."""
    root = _root(fields)
    if fields.messages is not None:
        return _text_keys(root, _parts(fields))
    given = fields.prompt if len(fields.prompt) else fields.input
    if bytes(given)[:1] == b'"':
        return _text_keys(root, [*_parts(fields), (b"\0", _content(bytes(given)))])
    if bytes(given)[:1] == b"[":
        return _id_keys(root, _decode_text(given))
    return PromptKeys([], [], [], 0)


def with_answer(fields: RequestFields, answer: str) -> PromptKeys:
    """Keys of the conversation including this answer, as the next turn sends it."""
    if fields.messages is None:
        return PromptKeys([], [], [], 0)
    return _text_keys(_root(fields), [*_parts(fields), (b"assistant\0\0\0", answer.encode())])


def _root(fields: RequestFields) -> bytes:
    tools = b"" if fields.tools is _NOTHING else bytes(fields.tools)
    seed = _seed if len(tools) <= LONG_TOOLS else _seed.__wrapped__  # not remembered
    return seed(fields.model or "", fields.cache_salt or "", tools)


@lru_cache(1024)
def _seed(model: str, salt: str, tools: bytes) -> bytes:
    return blake2b(repr((model, salt, tools)).encode(), digest_size=16).digest()


def _parts(fields: RequestFields) -> list[tuple[bytes, bytes]]:
    """Prefix and text of each part."""
    given = fields.instructions if fields.system is _NOTHING else fields.system
    parts = [] if given is _NOTHING else [(b"system\0\0", _content(bytes(given)))]
    for message in fields.messages or ():
        role, name, calls = message.role, message.name, message.tool_calls
        if name is _NOTHING and calls is _NOTHING:
            head = _PLAIN_HEADS.get(role) or role.encode() + b"\0\0\0"
        else:
            head = b"%b\0%b\0%b\0" % (role.encode(), name, calls)
        parts.append((head, _content(bytes(message.content))))
    return parts


def _content(given: bytes) -> bytes:
    """The text as it is; anything else as it was written."""
    if given[:1] != b'"':
        return given
    return given[1:-1] if _BACKSLASH not in given else _decode_text(given).encode()


def _text_keys(parent: bytes, parts: Sequence[tuple[bytes, bytes]]) -> PromptKeys:
    keys: list[int] = []
    tokens: list[int] = []
    texts: list[bytes] = []
    size = 0
    for head, text in parts:
        length = len(text)
        texts.append(text)
        if length > CHUNK_BYTES:
            parent = _chunk_keys(parent + head, text, size, keys, tokens)
        else:
            parent = blake2b(parent + head + text, digest_size=16).digest()
        size += length
        keys.append(_KEY(parent)[0])
        tokens.append(size // TOKEN_BYTES)
    return PromptKeys(keys, tokens, texts, size // TOKEN_BYTES)


def _chunk_keys(before: bytes, text: bytes, size: int, keys: list[int], tokens: list[int]) -> bytes:
    """Adds a key for every whole chunk but the last; the hash up to its end is returned. `size`: bytes before it."""
    at, length = 0, len(text)
    while length - at > CHUNK_BYTES:
        parent = blake2b(before + text[at : at + CHUNK_BYTES], digest_size=16).digest()
        keys.append(_KEY(parent)[0])
        at += CHUNK_BYTES
        tokens.append((size + at) // TOKEN_BYTES)
        before = parent + b"\0"
    return blake2b(before + text[at:], digest_size=16).digest()


def _id_keys(parent: bytes, given: Any) -> PromptKeys:
    if len(given) == 1 and isinstance(given[0], list):
        given = given[0]
    if not given or not all(type(id) is int and 0 <= id < 2**31 for id in given):
        return PromptKeys([], [], [], 0)
    keys, tokens = [], []
    for at in range(CHUNK_TOKENS, len(given) + 1, CHUNK_TOKENS):
        chunk = array("i", given[at - CHUNK_TOKENS : at]).tobytes()
        parent = blake2b(parent + chunk, digest_size=16).digest()
        keys.append(_KEY(parent)[0])
        tokens.append(at)
    return PromptKeys(keys, tokens, [], len(given))


def token_counts(found: PromptKeys, ids: Sequence[int], spell: Callable[[int], bytes]) -> list[int]:
    """Number of tokens completely before each boundary. `spell` returns the bytes of a token within a text."""
    if found.by_ids:
        return found.tokens
    pieces = [spell(id) for id in ids]
    ends, text = list(accumulate(map(len, pieces))), b"".join(pieces)
    counts: list[int] = []
    at = known = 0
    for part in found.parts:
        begin = text.find(part, at)
        if begin < 0:  # a template may trim what it is given
            part_there = part.strip()
            begin = text.find(part_there, at) - (len(part) - len(part.lstrip()))
            begin = begin if part_there and part_there in text[at:] else -1
        for offset in range(CHUNK_BYTES, max(len(part), 1) + CHUNK_BYTES, CHUNK_BYTES):
            if begin >= 0:
                known = max(known, bisect_right(ends, begin + min(offset, len(part))))
            counts.append(known)
        at = at if begin < 0 else begin + len(part)
    return counts
