"""Samples of random tokens: nothing to learn and nothing to read, for timing and for tests.

Sample `number` is a pure function of seed and number, one document of `sequence_length` tokens each.
"""

import torch

from cairn.train.data.batch import Batch, make_batch


class RandomTokens:
    samples_per_epoch: int | None = None

    def __init__(self, vocab: int, sequence_length: int, seed: int = 0) -> None:
        self.vocab, self.sequence_length, self.seed = vocab, sequence_length, seed
        self.fingerprint = f"random:{vocab}:{sequence_length}:{seed}"

    def batch(self, number: int) -> Batch:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        ids = torch.randint(self.vocab, (self.sequence_length + 1,), generator=generator)
        return make_batch(ids[:-1], ids[1:], [self.sequence_length], [number])
