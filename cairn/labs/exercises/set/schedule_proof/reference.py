"""Is it an all-reduce, and does it end?"""

from collections import Counter
from typing import NamedTuple


class Send(NamedTuple):
    source: int
    target: int
    chunk: int
    add: bool


Action = tuple[str, int]  # ("send" or "receive", the other rank)


def is_all_reduce(rounds: list[list[Send]], ranks: int, chunks: int) -> bool:
    """Whether every rank holds every contribution exactly once, in each chunk."""
    # begin answer
    slots = [[Counter({rank: 1}) for _ in range(chunks)] for rank in range(ranks)]
    for sends in rounds:
        messages = [(send, Counter(slots[send.source][send.chunk])) for send in sends]
        for send, content in messages:
            if send.add:
                slots[send.target][send.chunk].update(content)
            else:
                slots[send.target][send.chunk] = content
    whole = Counter(dict.fromkeys(range(ranks), 1))
    return all(chunk == whole for chunks in slots for chunk in chunks)
    # end answer


def hangs(actions: list[list[Action]]) -> bool:
    """Whether ranks that send and receive in this order, each blocking, ever get stuck."""
    # begin answer
    remaining = [list(mine) for mine in actions]
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(remaining):
            if not mine:
                continue
            kind, partner = mine[0]
            other_kind = "receive" if kind == "send" else "send"
            there = remaining[partner]
            if there and there[0] == (other_kind, rank):
                mine.pop(0)
                there.pop(0)
                moved = True
    return any(remaining)
    # end answer
