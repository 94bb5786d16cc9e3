"""The tokens of a prompt, as its server counts them: POST /tokenize, after the request itself was sent there.

What is asked is a prompt or a conversation of OpenAI's; a prompt of ids is known without asking. The tokens' spelling
says how many of them lie before each key of the prompt. It knows nothing about blocks.
"""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from cairn.fleet.paths import plain_path
from cairn.fleet.pulse_client import KEY, Unfollowed
from cairn.fleet.worker import Worker
from cairn.models.incremental_decode import DecoderRules, piece_of
from cairn.serve.text_keys import PromptKeys, token_counts

PASSED_ON = (
    "model",
    "prompt",
    "messages",
    "tools",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
)
TOKENIZED = frozenset((b"/v1/chat/completions", b"/v1/completions"))
LARGEST_ANSWER = 64 << 20
BYTE_LEVEL = DecoderRules(byte_level=True)
SENTENCE_PIECE = DecoderRules(byte_fallback=True, replace=(("▁", " "),))


class Tokenized(msgspec.Struct):
    tokens: list[int]
    token_strs: list[str] | None = None


class PromptTokens(msgspec.Struct, frozen=True):
    ids: list[int]
    counts: list[int]  # before each key


async def prompt_tokens(
    worker: Worker, path: bytes, body: bytes, keys: PromptKeys, timeout_s: float
) -> PromptTokens | None:
    """Tokens of a prompt from the server; None for other requests or if it does not respond."""
    if plain_path(path) not in TOKENIZED:
        return None
    fields = msgspec.json.decode(body)
    if keys.by_ids:
        prompt = fields["prompt"]
        return PromptTokens(prompt[0] if isinstance(prompt[0], list) else prompt, keys.tokens)
    question = {name: fields[name] for name in PASSED_ON if name in fields}
    with suppress(OSError, EOFError, TimeoutError, msgspec.MsgspecError, Unfollowed):
        async with asyncio.timeout(timeout_s):
            answer = await _post(worker, "/tokenize", question | {"return_token_strs": True})
        told = msgspec.json.decode(answer, type=Tokenized)
        if told.token_strs is not None and len(told.token_strs) == len(told.tokens):
            return PromptTokens(told.tokens, _counts(keys, told.token_strs))
    return None


def _counts(keys: PromptKeys, spelled: Sequence[str]) -> list[int]:
    rules = SENTENCE_PIECE if any("▁" in token for token in spelled) else BYTE_LEVEL

    def spell(at: int) -> bytes:
        piece = piece_of(spelled[at], rules)
        return piece.encode() if isinstance(piece, str) else piece

    return token_counts(keys, range(len(spelled)), spell)


async def _post(worker: Worker, path: str, document: dict[str, Any]) -> bytes:
    reader, writer = await asyncio.open_connection(worker.host, worker.port, limit=LARGEST_ANSWER)
    try:
        body, key = msgspec.json.encode(document), os.environ.get(KEY)
        lines = [
            f"POST {path} HTTP/1.1",
            f"host: {worker.host}:{worker.port}",
            "connection: close",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *([f"authorization: Bearer {key}"] if key else []),
        ]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        head, _, rest = (await reader.read(-1)).partition(b"\r\n\r\n")
        if head.split(b" ", 2)[1:2] != [b"200"] or b"chunked" in head.lower():
            raise Unfollowed(f"POST {path} was answered with {head[:40]!r}")
        return rest
    finally:
        writer.close()
