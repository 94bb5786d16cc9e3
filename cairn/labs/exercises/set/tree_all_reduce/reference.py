"""Rounds of sends; all of a round happen at once."""

from typing import NamedTuple


class Send(NamedTuple):
    source: int
    target: int
    add: bool  # the receiver adds it; otherwise it replaces its own


def tree_all_reduce(n: int) -> list[list[Send]]:
    """Rounds after which every rank holds the sum of all n."""
    # begin answer
    up: list[list[Send]] = []
    distance = 1
    while distance < n:
        up.append([Send(i, i - distance, add=True) for i in range(distance, n, 2 * distance)])
        distance *= 2
    down = [[Send(send.target, send.source, add=False) for send in sends] for sends in reversed(up)]
    return up + down
    # end answer
