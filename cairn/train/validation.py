"""How well does the model do on data that it never learns from? The loss there, bits per byte, and sample texts.

    held-out samples 0..n, always the same -> parallel.forward, no gradients -> loss (by source), bits per byte
    prompts -> the most likely token, again and again -> texts

Works in every layout, because `Parallel.forward` does. It changes nothing that training depends on: no weight, no
random number, no sample of the training data, so a run with validation has the losses of the run without it.
"""

import math
import time

import torch

from cairn.models.tokenizer import Tokenizer
from cairn.train.data.batch import IGNORED, Batch, join, make_batch
from cairn.train.data.blend import Blend
from cairn.train.data.source import Source, share
from cairn.train.heads import MostLikely, TargetLogProbs, loss_by_stream
from cairn.train.metrics_log import HeldOut
from cairn.train.serving_kl import divergence, obstacle
from cairn.train.state import TrainState

SOURCE = "source"  # the stream that says which source of a blend a token is from
PADDED = 64  # tokens of a pass are a multiple of it, so that every layout can cut them


class Validation:
    """All processes of a run call the same methods in the same order."""

    def __init__(
        self, state: TrainState, source: Source | None, tokenizer: Tokenizer | None, fused: bool
    ) -> None:
        """`source`: what is kept apart; None: only texts are sampled."""
        self.state, self.source, self.tokenizer = state, source, tokenizer
        self.settings = state.config.validation
        self.log_probs = TargetLogProbs(state.spec, fused=fused)
        self.most_likely = MostLikely(state.spec)
        self.names = source.names if isinstance(source, Blend) else []
        # To the model that would be served; of the last measurement.
        self.serving_kl: float | None = None
        self._batches: list[Batch] = []  # on the host, made once
        self._bytes = 0  # of the text that their targets spell

    def is_due(self, step: int) -> bool:
        every = self.settings.every
        return bool(every) and step % every == 0

    def measure(self) -> HeldOut:
        began = time.perf_counter()
        by_source, size = self._losses() if self.source is not None else ([], 0)
        nats, tokens = sum(one[0] for one in by_source), sum(one[1] for one in by_source)
        loss = mean(nats, tokens)
        texts = self._texts()
        return HeldOut(
            step=self.state.step,
            loss=loss,
            bits_per_byte=nats / math.log(2) / size if size and loss is not None else None,
            tokens=tokens,
            seconds=time.perf_counter() - began,
            texts=texts,
            serving_kl=self.serving_kl,
            by_source=dict(zip(self.names, (mean(*one) for one in by_source), strict=False)),
        )

    def _losses(self) -> tuple[list[tuple[float, int]], int]:
        """Nats and tokens of each source's held-out samples, and the bytes of all, over all ranks."""
        parallel, device = self.state.parallel, self.state.device
        if not self._batches:
            self._batches = self._make()
            self._bytes = sum(text_bytes(batch, self.tokenizer) for batch in self._batches)
        batches = [batch.to(device) for batch in self._batches]
        count = max(1, len(self.names))
        sums = torch.zeros(count + 1, 2, dtype=torch.float64, device=device)
        sums[count, 0] = self._bytes
        # A step's worth at a time: a pipeline is made for so many microbatches.
        for begin in range(0, len(batches), self.state.config.microbatches):
            part = batches[begin : begin + self.state.config.microbatches]
            values = parallel.forward(part, self.log_probs)
            sums[:count] += loss_by_stream(values, part, SOURCE, count)
            if begin == 0 and self.settings.serving_kl and obstacle(self.state) is None:
                total, tokens = divergence(self.state, part, values)
                self.serving_kl = mean(total, tokens)
        *by_source, (size, _) = parallel.sum_over_data(sums).tolist()
        return [(nats, int(tokens)) for nats, tokens in by_source], int(size)

    def _make(self) -> list[Batch]:
        """This rank's microbatches of the held-out samples; no more of them than there are, but at least one step's."""
        assert self.source is not None
        data, parallel = self.state.config.data, self.state.parallel
        steps = self.settings.batches
        if self.source.samples_per_epoch is not None:
            steps = min(steps, max(1, self.source.samples_per_epoch // data.sequences))
        batches = []
        for step in range(steps):
            numbers = share(
                step * data.sequences, parallel.data_rank, parallel.data_ranks, data.sequences
            )
            for begin in range(0, len(numbers), data.microbatch):
                some = numbers[begin : begin + data.microbatch]
                batches.append(join([self._sample(number) for number in some]))
        return batches

    def _sample(self, number: int) -> Batch:
        """With the source of the blend that it comes from, for each token."""
        assert self.source is not None
        sample = self.source.batch(number)
        which = self.source.pattern.locate(number)[0] if isinstance(self.source, Blend) else 0
        return sample._replace(extra={SOURCE: torch.full_like(sample.tokens_T, which)})

    def _texts(self) -> list[str]:
        """Each prompt with its continuation; greedy, so the same in every layout but for ties."""
        if self.tokenizer is None or not self.settings.prompts:
            return []
        longest = self.state.config.data.sequence - self.settings.tokens
        sequences = [self.tokenizer.encode(prompt)[-longest:] for prompt in self.settings.prompts]
        room = sum(map(len, sequences)) + len(sequences) * self.settings.tokens
        ended: set[int] = set()
        for _ in range(self.settings.tokens):
            if len(ended) == len(sequences):
                break
            for place, token in enumerate(self._next(sequences, room)):
                if token in self.tokenizer.eos_ids:
                    ended.add(place)
                elif place not in ended:
                    sequences[place].append(token)
        return [self.tokenizer.decode(ids) for ids in sequences]

    def _next(self, sequences: list[list[int]], room: int) -> list[int]:
        """The most likely token after each of these texts, which stand side by side in one pass."""
        padding = -(-room // PADDED) * PADDED - sum(map(len, sequences))
        tokens = [token for ids in sequences for token in ids] + [0] * padding
        longest = min(PADDED, self.state.config.data.sequence)  # rotations reach no further
        spare = [min(longest, padding - at) for at in range(0, padding, longest)]
        lengths = [len(ids) for ids in sequences] + spare
        tokens_T = torch.tensor(tokens)
        batch = make_batch(tokens_T, torch.full_like(tokens_T, IGNORED), lengths, [])
        (values,) = self.state.parallel.forward([batch.to(self.state.device)], self.most_likely)
        ends = torch.tensor([len(ids) for ids in sequences]).cumsum(0) - 1
        return values["token"][ends.to(values["token"].device)].tolist()


def mean(nats: float, tokens: int) -> float | None:
    """None where there is nothing to be the mean of, or it is not finite."""
    return nats / tokens if tokens and math.isfinite(nats) else None


def text_bytes(batch: Batch, tokenizer: Tokenizer | None) -> int:
    """How many bytes of text the targets of a batch spell; special tokens spell none."""
    if tokenizer is None:
        return 0
    total = 0
    for targets_T in batch.targets_T.split(batch.lengths):
        total += len(tokenizer.decode(targets_T[targets_T != IGNORED].tolist()).encode())
    return total


def in_words(evaluation: HeldOut) -> list[str]:
    """Lines for a person."""
    parts = [f"held-out loss {evaluation.loss:.4f}"] if evaluation.loss is not None else []
    parts += (
        [f"{evaluation.bits_per_byte:.4f} bits per byte"]
        if evaluation.bits_per_byte is not None
        else []
    )
    parts += [
        f"{name} {loss:.4f}" for name, loss in evaluation.by_source.items() if loss is not None
    ]
    parts += (
        [f"KL to the served model {evaluation.serving_kl:.1e}"]
        if evaluation.serving_kl is not None
        else []
    )
    first = [f"step {evaluation.step}: {', '.join(parts)}"] if parts else []
    return first + [
        f"step {evaluation.step}: {' '.join(text.split())}" for text in evaluation.texts
    ]
