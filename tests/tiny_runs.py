"""Small runs for tests: a recipe that trains in seconds, and a source whose samples can be spoilt."""

from pathlib import Path

import msgspec
import torch

from cairn.train.config import Checkpoint, Data, Log, Model, Optim, Train
from cairn.train.data.source import microbatch
from cairn.train.loop import Loop
from cairn.train.prepare import prepare
from cairn.train.random_tokens import RandomTokens
from cairn.train.step import train_step

TINY = Model(
    preset="tiny-qwen3", layers=2, hidden=32, heads=2, kv_heads=1, intermediate=48, vocab=64
)


def recipe(folder=None, **changes) -> Train:
    fields = dict(
        steps=20,
        out=folder,
        model=TINY,
        optim=Optim(lr=1e-2),
        data=Data(sources=["random"], sequence=32, sequences=4, microbatch=4),
        checkpoint=Checkpoint(every=5, keep=3, export=False),
        log=Log(every=1),
        device="cpu",
    )
    return Train(**(fields | changes))


def state_of(config: Train):
    return prepare(config if config.out else msgspec.structs.replace(config, out=Path.cwd()))


def steps(prepared, count, source=None):
    """Run steps by hand; the results."""
    state, results = prepared.state, []
    source = source or prepared.corpus.source
    size = state.config.data.microbatch
    for _ in range(count):
        numbers = range(state.samples, state.samples + state.config.data.sequences)
        parts = [numbers[i : i + size] for i in range(0, len(numbers), size)]
        batches = [microbatch(source, part).to(state.device) for part in parts]
        results.append(train_step(state, batches))
    return results


def losses(results):
    return [result.loss.item() for result in results]


def weights(prepared):
    return {n: p.detach().clone() for n, p in prepared.state.parallel.parameters().items()}


def loop(
    config: Train,
    source=None,
    log_line=lambda text: None,
    on_record=lambda record: None,
    world=1,
    rank=0,
):
    torch.set_num_threads(1)
    prepared = prepare(config)
    config.folder.mkdir(parents=True, exist_ok=True)
    return Loop(prepared.state, source or prepared.corpus.source, world, rank, log_line, on_record)


class Spoilt(RandomTokens):
    """Some samples make the loss NaN: their tokens point at a row of the embedding that is NaN."""

    def __init__(self, *args, bad=(), **kwargs):
        super().__init__(*args, **kwargs)
        self.bad = set(bad)

    def batch(self, number):
        batch = super().batch(number)
        tokens = batch.tokens_T.clamp(max=self.vocab - 2)  # the last one is poison
        targets = batch.targets_T.clamp(max=self.vocab - 2)
        if number in self.bad:
            tokens[0] = self.vocab - 1
        return batch._replace(tokens_T=tokens, targets_T=targets)


class Same(RandomTokens):
    """One sample, again and again: something to learn by heart."""

    def batch(self, number):
        return super().batch(0)._replace(ids=[number])
