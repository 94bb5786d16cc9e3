"""Follows the KV-cache events of a server that has no pulse, such as vLLM: what it tells goes into the index of keys.

    SUB      topic | number, 8 bytes, big endian | batch                --> BatchFollower --> KeyIndex
    DEALER   "" | first missing number  -->  (number | batch)*, then -1     what got lost, and everything at the start

Nothing is counted on before the server is up, and it begins anew after it was down. Whether it is up, `PulseClient`
finds out; a server that has a pulse is followed by that alone.
"""

import asyncio

import msgspec
import zmq
import zmq.asyncio

from cairn.fleet.block_batches import BatchFollower
from cairn.fleet.config import BlockSource
from cairn.fleet.index import KeyIndex
from cairn.fleet.prompt_tokens import prompt_tokens
from cairn.fleet.worker import Worker
from cairn.serve.pulse import Events
from cairn.serve.text_keys import PromptKeys

LOOK_MS = 200
MOST_UNREAD = 100_000  # batches
MOST_ASKING = 8  # requests for the tokens of a prompt at a time; further prompts are not learnt
END = (-1).to_bytes(8, "big", signed=True)


class BlockClient:
    def __init__(
        self, worker: Worker, index: KeyIndex, source: BlockSource, timeout_s: float
    ) -> None:
        self.worker, self.index, self.source = worker, index, source
        self.follower = BatchFollower()
        self._timeout_s, self._asking = timeout_s, 0
        self._context = zmq.asyncio.Context.instance()

    # -- events ----------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            try:
                await self._follow()
            except (msgspec.MsgspecError, ValueError):  # nothing that we understand
                self.index.forget(self.worker.number)
                await asyncio.sleep(self._timeout_s)

    async def _follow(self) -> None:
        with self._context.socket(zmq.SUB) as following:
            following.set_hwm(MOST_UNREAD)
            following.linger = 0
            following.subscribe(b"")
            following.connect(self.source.events)
            while True:
                come = await following.poll(LOOK_MS)
                frames = await following.recv_multipart() if come else None
                if self.worker.state != "up" or self.worker.hello is not None:
                    continue
                if not self.index.knows(self.worker.number):
                    await self._begin()
                if frames is not None:
                    await self._take(frames)

    async def _begin(self) -> None:
        """Start with all events that the server still has."""
        self.follower.start_over()
        self.follower.catch_up(await self._sent_again(0))
        self.index.forget(self.worker.number)
        self.index.note(self.worker.number, Events(0, self.follower.book.snapshot()))

    async def _take(self, frames: list[bytes]) -> None:
        *_, number, batch = frames
        at = int.from_bytes(number, "big")
        missing = self.follower.take(at, batch)
        if missing is not None:
            self.follower.catch_up(await self._sent_again(missing) | {at: batch})
        self.tell()

    async def _sent_again(self, start: int) -> dict[int, bytes]:
        """Batches from this number on, as far as the server remembers them."""
        batches: dict[int, bytes] = {}
        if not self.source.replay:
            return batches
        with self._context.socket(zmq.DEALER) as asking:
            asking.linger = 0
            asking.connect(self.source.replay)
            await asking.send_multipart([b"", start.to_bytes(8, "big")])
            while await asking.poll(round(self._timeout_s * 1000)):
                *_, number, batch = await asking.recv_multipart()
                if number == END:
                    break
                batches[int.from_bytes(number, "big")] = batch
        return batches

    def tell(self) -> None:
        """The index, what is new."""
        known = self.index.knows(self.worker.number)
        if known and (events := self.follower.book.outbox.take()) is not None:
            self.index.note(self.worker.number, events)

    # -- prompts ---------------------------------------------------------------------------------

    def wants(self, keys: PromptKeys) -> bool:
        """Is it worth knowing this prompt's tokens?"""
        book = self.follower.book
        unknown = bool(keys.keys) and not book.knows(keys.keys[-1])
        return unknown and keys.length >= book.block_size and self._asking < MOST_ASKING

    async def learn(
        self, path: bytes, body: bytes, keys: PromptKeys, others: list["BlockClient"]
    ) -> None:
        """The tokens of a prompt that was sent to this server; they are the same at others of its model."""
        self._asking += 1
        try:
            told = await prompt_tokens(self.worker, path, body, keys, self._timeout_s)
        finally:
            self._asking -= 1
        if told is not None:
            for one in others:
                one.follower.book.bind(keys.keys, told.counts, told.ids)
                one.tell()
