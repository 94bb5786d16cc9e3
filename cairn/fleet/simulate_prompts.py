"""Requests of a trace as a fleet's simulation takes them: with the keys of their prompts; or made up.

A block of the trace stands for 512 tokens; equal blocks at the beginning are one prefix. Pure.
"""

import itertools
import random
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from cairn.bench.arrival_traces import BLOCK_TOKENS, TracedRequest

MOST_TURNS, MOST_BLOCKS_OF_TURN, LONGEST_ANSWER = 8, 6, 300  # of made-up conversations


class Prompt(msgspec.Struct, frozen=True):
    """A request of the trace, ready to be hashed."""

    traced: TracedRequest
    keys: list[int]  # at the end of each block
    tokens: list[int]  # up to there
    hashes: list[bytes]  # of its full pages


def prompts_of(
    trace: Sequence[TracedRequest], page_size: int, block_tokens: int = BLOCK_TOKENS
) -> list[Prompt]:
    """Hashes of blocks, and of the pages in them; a block that many share is hashed once."""
    known: dict[tuple[bytes, int], tuple[bytes, list[bytes]]] = {}
    made = []
    for number, one in enumerate(trace):
        parent, keys, hashes = b"", list[int](), list[bytes]()
        for block in one.blocks or (-1 - number,) * -(-one.input_tokens // block_tokens):
            if (parent, block) not in known:
                known[parent, block] = _block(parent, block, max(block_tokens // page_size, 1))
            parent, pages = known[parent, block]
            keys.append(int.from_bytes(parent[:8], "little"))
            hashes += pages
        tokens = [min(block_tokens * (at + 1), one.input_tokens) for at in range(len(keys))]
        made.append(Prompt(one, keys, tokens, hashes[: one.input_tokens // page_size]))
    return made


def _block(parent: bytes, block: int, pages_of_block: int) -> tuple[bytes, list[bytes]]:
    key = blake2b(parent + block.to_bytes(8, "little", signed=True), digest_size=16).digest()
    pages = [
        blake2b(key + at.to_bytes(4, "little"), digest_size=16).digest()
        for at in range(pages_of_block)
    ]
    return key, pages


def fitting(trace: Sequence[TracedRequest], context: int) -> list[TracedRequest]:
    """Requests that fit into the context of a server."""
    return [one for one in trace if one.input_tokens + one.output_tokens <= context]


def from_zero(trace: Sequence[TracedRequest]) -> list[TracedRequest]:
    """The same requests, of which the first one comes at once."""
    first_s = trace[0].at_s
    return [msgspec.structs.replace(one, at_s=one.at_s - first_s) for one in trace]


def conversation_blocks(context: int, page_size: int) -> int:
    """Tokens of a block with which the longest made-up conversation fits; at least a page."""
    blocks = 2 + MOST_TURNS * MOST_BLOCKS_OF_TURN
    tokens = BLOCK_TOKENS
    while tokens > page_size and blocks * tokens + LONGEST_ANSWER > context:
        tokens //= 2
    return tokens


def conversations(
    requests: int, seed: int = 0, block_tokens: int = BLOCK_TOKENS
) -> list[TracedRequest]:
    """Made-up conversations: a system prompt that many share, turns that grow, people who take their time."""
    draw = random.Random(seed)
    made: list[TracedRequest] = []
    fresh = itertools.count(1000)
    while len(made) < requests:
        at_s = draw.uniform(0, requests)
        blocks = [draw.randrange(8), 100 + draw.randrange(16)]
        for _ in range(draw.randint(1, MOST_TURNS)):
            blocks = [*blocks, *(next(fresh) for _ in range(draw.randint(1, MOST_BLOCKS_OF_TURN)))]
            answer = draw.randint(20, LONGEST_ANSWER)
            made.append(TracedRequest(at_s, block_tokens * len(blocks), answer, tuple(blocks)))
            at_s += draw.expovariate(1 / 30)
    return sorted(made, key=lambda one: one.at_s)[:requests]
