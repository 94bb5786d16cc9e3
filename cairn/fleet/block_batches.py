"""vLLM's KV-cache events, decoded and put in order: batches get lost, doubled and reordered on their way.

    number 4, 5        applied as they come
    number 5 again     ignored, unless it was made later than all others: then the server was started again
    number 8           6 and 7 are missing: they are asked for (`catch_up`); what the server has forgotten by then makes
                       every block that was told before unknown, because one of them may be gone

Events are maps, as in vLLM since its pull request 42892, or arrays, as before and in SGLang. Blocks of an adapter, with
extra keys (salts, pictures), outside of the GPU and of cache groups after the first are left out: a prompt's tokens
alone do not find them. Pure: no socket, no clock.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from cairn.fleet.block_keys import BlockHash, BlockKeys


class BlockStored(msgspec.Struct, frozen=True, kw_only=True):
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None = None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None

    @property
    def found_by_tokens(self) -> bool:
        extra = any(self.extra_keys or ())
        return self.lora_id is None and self.lora_name is None and not extra


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True):
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True):
    pass


class Batch(msgspec.Struct, frozen=True, array_like=True):
    made_s: float
    events: list[Any]  # what may follow, the rank of a data-parallel engine, does not matter


_decode = msgspec.msgpack.Decoder(Batch).decode
Event = BlockStored | BlockRemoved | AllBlocksCleared
KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}


def decode_batch(payload: bytes) -> tuple[float, list[Event]]:
    """When it was made, and its events; those of a kind that is not known are left out."""
    batch = _decode(payload)
    events = []
    for event in batch.events:
        name, fields = _fields(event)
        if (kind := KINDS.get(name)) is not None:
            events.append(msgspec.convert(fields, kind))
    return batch.made_s, events


def _fields(event: object) -> tuple[str, Mapping[str, object]]:
    if isinstance(event, dict):
        return str(event.get("type")), event
    if not isinstance(event, list) or not event:
        raise msgspec.ValidationError(f"an event is {event!r}, neither a map nor an array")
    name, *values = event
    kind = KINDS.get(str(name))
    return str(name), dict(zip(kind.__struct_fields__ if kind else (), values, strict=False))


class BatchFollower:
    """Block events of a server, applied in order."""

    def __init__(self) -> None:
        self.book = BlockKeys()
        self.due = 0  # the number that comes next
        self._made_s = float("-inf")  # when the last batch was made

    def take(self, number: int, payload: bytes) -> int | None:
        """Apply a batch; or the number from which on batches are missing, and nothing was applied."""
        made_s, events = decode_batch(payload)
        if number < self.due:
            if made_s <= self._made_s:
                return None
            self.start_over()
        if number > self.due:
            return self.due
        self._apply(number, made_s, events)
        return None

    def catch_up(self, batches: Mapping[int, bytes]) -> None:
        """Apply the missing batches that the server still has, and the one that revealed the gap."""
        for number in sorted(batches):
            if number > self.due:
                self.book.clear()
            if number >= self.due:
                self._apply(number, *decode_batch(batches[number]))

    def start_over(self) -> None:
        """Another process of the server: nothing that was told before counts."""
        self.book.clear()
        self.due, self._made_s = 0, float("-inf")

    def _apply(self, number: int, made_s: float, events: list[Event]) -> None:
        self.due, self._made_s = number + 1, max(made_s, self._made_s)
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.book.clear()
            elif event.medium not in (None, "GPU") or event.group_idx:
                continue
            elif isinstance(event, BlockRemoved):
                self.book.remove(event.block_hashes)
            elif event.found_by_tokens:
                self.book.store(
                    event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size
                )
