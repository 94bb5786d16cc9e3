"""A schedule is a list of rounds; all sends of a round happen at once."""

from typing import NamedTuple


class Send(NamedTuple):
    source: int
    target: int
    chunk: int  # of n chunks
    add: bool  # the receiver adds it; otherwise it replaces its own


def ring_all_reduce(n: int) -> list[list[Send]]:
    """Rounds after which every rank holds the sum of all n."""
    # begin answer
    scatter = [
        [Send(i, (i + 1) % n, (i - r) % n, add=True) for i in range(n)] for r in range(n - 1)
    ]
    gather = [
        [Send(i, (i + 1) % n, (i + 1 - r) % n, add=False) for i in range(n)] for r in range(n - 1)
    ]
    return scatter + gather
    # end answer
