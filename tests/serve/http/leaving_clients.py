"""Clients that leave: before a request is whole, before its answer begins, in the middle, after it; or never read.

    asyncio.run(come_and_go(port, 500, seed=3))      Counter({"cut body": 104, "no answer": 97, "middle": ..., ...})

Each comes over a connection of its own, some of them end it with a reset. A client that stays to the end checks that
its answer is whole.
"""

import asyncio
import json
import random
import socket
import struct
from collections import Counter
from typing import Literal

Leaves = Literal["cut head", "cut body", "no answer", "middle", "end"]
WAYS: tuple[Leaves, ...] = ("cut head", "cut body", "no answer", "middle", "middle", "end")
AT_ONCE = 32
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: leave without a good-bye


def wire(tokens: int, path: str = "/v1/completions", **more: object) -> tuple[bytes, bytes]:
    """Head and body of a request that streams."""
    said: dict[str, object] = {"messages": [{"role": "user", "content": "Once"}]}
    if path == "/v1/completions":
        said = {"prompt": "Once upon"}
    body = json.dumps(dict(said, max_tokens=tokens, ignore_eos=True, stream=True, **more)).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode(), body


async def come_and_go(port: int, count: int, seed: int, tokens: int = 40) -> Counter[str]:
    """So many clients, some at a time; how they left, and with what statuses."""
    draw, free, seen = random.Random(seed), asyncio.Semaphore(AT_ONCE), Counter[str]()

    async def one(way: Leaves, reset: bool, amount: float, path: str) -> None:
        async with free:
            seen[way] += 1
            seen[await _client(port, way, reset, amount, tokens, path)] += 1

    paths = ("/v1/completions", "/v1/chat/completions")
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            drawn = draw.choice(WAYS), draw.random() < 0.3, draw.random(), draw.choice(paths)
            group.create_task(one(*drawn))
    return seen


async def _client(
    port: int, way: Leaves, reset: bool, amount: float, tokens: int, path: str
) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head, body = wire(tokens, path, n=2)
    try:
        match way:
            case "cut head":
                writer.write(head[: int(amount * len(head))])
            case "cut body":
                writer.write(head + body[: int(amount * len(body))])
            case _:
                writer.write(head + body)
        await writer.drain()
        match way:
            case "middle":
                first = await reader.readline()
                for _ in range(int(amount * tokens * 4)):  # an event has several lines
                    if b"[DONE]" in await reader.readline():
                        break
                return first.decode().strip()
            case "end":
                answer = await reader.readuntil(b"\r\n\r\n")
                if b" 200 " in answer.splitlines()[0]:
                    rest = await reader.readuntil(b"[DONE]")
                    assert rest.count(b'"finish_reason":"length"') == 2, rest[-500:]
                return answer.splitlines()[0].decode()
            case _:
                await asyncio.sleep(amount * 0.02)
                return "left"
    finally:
        if reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.close()


def deaf(port: int, tokens: int) -> socket.socket:
    """A client with hardly a buffer, which has asked and never reads."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    made.connect(("127.0.0.1", port))
    head, body = wire(tokens)
    made.sendall(head + body)
    return made
