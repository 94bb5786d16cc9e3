"""Samples that are made up as they are asked for: no file, no end, the same on every machine.

sample i    document (i, 0) | document (i, 1) | ... until the sample is full; the last one is cut

stories      short stories from a grammar             everything is learnt
arithmetic   sums with their answers                  everything is learnt
chats        small conversations                      only the assistant's words are learnt
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from cairn.core.errors import ConfigError, did_you_mean
from cairn.models.tokenizer import Tokenizer
from cairn.train.data.arithmetic import problem
from cairn.train.data.chats import chat
from cairn.train.data.counter_rng import mix
from cairn.train.data.stories import story
from cairn.train.data.tokenizer_identity import tokenizer_hash
from cairn.train.data.windows import IGNORED

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch

Document = Callable[[int, int], str]  # seed, number -> text

TEXTS: dict[str, Document] = {
    "stories": story,
    "arithmetic": lambda seed, number: problem(seed, number).text,
}
CHATS = "chats"
NAMES = (*TEXTS, CHATS)
HELD_OUT = 0x76616C  # mixed into the seed


def as_text(name: str, seed: int, number: int) -> str:
    """A document (also a chat) as plain text, for training a tokenizer."""
    if name in TEXTS:
        return TEXTS[name](seed, number)
    if name == CHATS:
        return "\n".join(message["content"] for message in chat(seed, number))
    raise ConfigError(
        f"there is no procedural corpus {name!r}",
        hint=did_you_mean(name, NAMES, otherwise=f"there are {', '.join(NAMES)}"),
    )


class Procedural:
    """An endless Source."""

    samples_per_epoch: int | None = None

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        sequence_length: int,
        seed: int = 0,
        boundaries: bool = True,
        held_out: bool = False,
    ) -> None:
        """`held_out`: documents of another seed, which training never sees."""
        seed = mix(seed, HELD_OUT) if held_out else seed
        as_text(name, seed, 0)  # refuses an unknown name
        self.name, self.sequence_length = name, sequence_length
        self._tokenizer, self._seed, self._boundaries = tokenizer, seed, boundaries
        self._end = [*tokenizer.eos_ids[:1]]
        self._chats = None
        if name == CHATS:
            from cairn.train.data.chat_tokens import ChatEncoder

            self._chats = ChatEncoder(tokenizer)
        self.fingerprint = (
            f"{name}, seed {seed}, {sequence_length} tokens by {tokenizer_hash(tokenizer)}, "
            f"boundaries {boundaries}"
        )

    def batch(self, number: int) -> "Batch":
        import torch

        from cairn.train.data.batch import make_batch

        tokens, targets, lengths = self._fill(number)
        return make_batch(torch.from_numpy(tokens), torch.from_numpy(targets), lengths, [number])

    def _fill(self, number: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        room, place = self.sequence_length, 0
        all_ids: list[np.ndarray] = []
        all_targets: list[np.ndarray] = []
        while room:
            ids, learn = self._document(mix(self._seed, number), place)
            targets = np.full(len(ids), IGNORED)  # the last token of a document predicts nothing
            targets[:-1] = np.where(learn[1:], ids[1:], IGNORED)
            all_ids.append(ids[:room])
            all_targets.append(targets[:room])
            room -= len(all_ids[-1])
            place += 1
        lengths = [len(ids) for ids in all_ids]
        if not self._boundaries:
            lengths = [self.sequence_length]
        return np.concatenate(all_ids), np.concatenate(all_targets), lengths

    def _document(self, seed: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids, and which of them are to be learnt."""
        if self._chats is not None:
            encoded = self._chats.encode(chat(seed, number))
            return encoded.ids, encoded.learn
        text = TEXTS[self.name](seed, number)
        ids = np.asarray([*self._tokenizer.encode(text), *self._end], np.int64)
        return ids, np.ones(len(ids), bool)


def small_tokenizer(names: tuple[str, ...] = NAMES, vocab: int = 2048, seed: int = 0) -> Tokenizer:
    """A tokenizer for procedural corpora, trained on their first documents in about a second.

    It has at most `vocab` tokens: when every word has become one, there is nothing left to learn.
    """
    from cairn.train.data.tokenizer_trainer import train_tokenizer

    return train_tokenizer(first_texts(names, seed), vocab, fewer=True)


def first_texts(names: tuple[str, ...], seed: int) -> Iterator[str]:
    """Texts for training a small tokenizer."""
    return (as_text(name, seed, number) for number in range(2000) for name in names)
