"""Shuffle order of an epoch: a permutation that needs no memory.

A Feistel network permutes a power of four; numbers beyond n are sent through it again until they fall below n
(cycle walking), which leaves a permutation of 0..n-1. Any place of the order is found at once, so there is no
shuffled array to build, keep or save, and nothing depends on how many ranks ask.

    number 1007 of n = 1000   ->   epoch 1, place 7   ->   item 613 of 0..999
                                                              |  left  right
                                   each round:                |  right  left ^ f(right, round, key)

Knows nothing about what is shuffled.
"""

from cairn.core.errors import ConfigError
from cairn.train.data.counter_rng import mix

ROUNDS = 6  # four are a pseudo-random permutation on paper; small domains like two more


def shuffled(number: int, items: int, seed: int) -> tuple[int, int]:
    """(epoch, item) at place `number` of the endless stream; each epoch is a permutation of its own."""
    if items < 1 or number < 0:
        raise ConfigError(f"there is no sample {number} of {items}", hint="samples count from 0")
    epoch, place = divmod(number, items)
    return epoch, permute(place, items, mix(seed, epoch))


def permute(place: int, items: int, key: int) -> int:
    """Position of `place` in the permutation of 0..items-1 selected by `key`."""
    half = max(1, ((items - 1).bit_length() + 1) // 2)
    while True:
        place = _feistel(place, half, key)
        if place < items:
            return place


def _feistel(value: int, half: int, key: int) -> int:
    """A permutation of 2 * half bits. Every round can be undone, whatever `mix` gives."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(ROUNDS):
        left, right = right, left ^ (mix(key, turn, right) & mask)
    return (left << half) | right
