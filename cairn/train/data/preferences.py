"""Files of preferences as samples: one pair of answers, or one judged answer, in each.

    chosen ......... | rejected ....... | padding         pairs (DPO, IPO, ORPO, SimPO, reward model)
    completion ..... | another's ...... | padding         single answers (KTO): the prompt with another line's answer,
                                                          which says how far the policy has moved at all

For a reward model (`scored`) each answer has one target: one more end token behind it, whose log-probability is its
score.

Every sample has `sequence_length` tokens and exactly three documents; only tokens of answers have targets. The stream
`side` says which document a token belongs to (0, 1, and 2 for padding). The samples of an epoch come in an order of
their own. Texts are joined as they are; messages are written by the tokenizer's chat template.
"""

import hashlib
from codecs import BOM_UTF8
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cairn.core.errors import DataError
from cairn.models.tokenizer import Tokenizer
from cairn.train.data.batch import IGNORED, Batch, Document, pack
from cairn.train.data.chat_tokens import ChatEncoder
from cairn.train.data.preference_files import Pair, RatedAnswer, Text, read_judged, read_pair
from cairn.train.data.shuffle import shuffled

SIDE, GOOD, MARGIN = "side", "good", "margin"
Encoded = tuple[np.ndarray, np.ndarray]  # ids, and which of them are to be learnt


class Preferences:
    """A `Source`; `judged`: of single answers with a label, as KTO learns from."""

    def __init__(
        self,
        files: Sequence[Path],
        tokenizer: Tokenizer,
        sequence_length: int,
        seed: int,
        *,
        judged: bool,
        scored: bool = False,
    ) -> None:
        self.sequence_length, self.seed, self.judged = sequence_length, seed, judged
        self._score_id = _end(tokenizer) if scored else None
        self._tokenizer = tokenizer
        self._chats: ChatEncoder | None = None
        pad = tokenizer.pad_id
        self._pad = pad if pad is not None else (*tokenizer.eos_ids, 0)[0]
        digest = hashlib.blake2b(digest_size=8)
        self._samples: list[tuple[Encoded, Encoded, float]] = []  # and label or margin
        rows: list[RatedAnswer] = []
        for file in _files(files):
            content = file.read_bytes().removeprefix(BOM_UTF8)
            for number, line in enumerate(content.splitlines(), 1):
                if not line.strip():
                    continue
                digest.update(line)
                where = f"{file}:{number}"
                if judged:
                    rows.append(read_judged(line, where))
                else:
                    self._samples.append(self._pair(read_pair(line, where), where))
        for at, row in enumerate(rows):
            self._samples.append(self._single(row, rows[(at + 1) % len(rows)]))
        if not self._samples:
            raise DataError("there are no preferences in the files of data.sources")
        if judged and len(rows) < 2:
            raise DataError(
                "there is one judged answer", hint="KTO compares with the answers of other lines"
            )
        self.fingerprint = f"{len(self._samples)} preferences {digest.hexdigest()}, seed {seed}"

    @property
    def samples_per_epoch(self) -> int | None:
        return len(self._samples)

    def batch(self, number: int) -> Batch:
        _, at = shuffled(number, len(self._samples), self.seed)
        first, second, value = self._samples[at]
        documents = [
            _document(ids, learn, side, self._score_id)
            for side, (ids, learn) in enumerate((first, second))
        ]
        packed = pack(documents, self.sequence_length, self._pad, [number])
        packed.extra[SIDE][sum(packed.lengths[:2]) :] = 2
        name = GOOD if self.judged else MARGIN
        packed.extra[name] = torch.full((self.sequence_length,), value)
        return packed

    def _pair(self, pair: Pair, where: str) -> tuple[Encoded, Encoded, float]:
        chosen, rejected = (
            self._encode(pair.prompt, text) for text in (pair.chosen, pair.rejected)
        )
        self._check(len(chosen[0]) + len(rejected[0]), where)
        return chosen, rejected, pair.margin

    def _single(self, row: RatedAnswer, other: RatedAnswer) -> tuple[Encoded, Encoded, float]:
        own, mismatched = (self._encode(row.prompt, one.completion) for one in (row, other))
        self._check(len(own[0]) + len(mismatched[0]), f"the answer to {str(row.prompt)[:60]!r}")
        return own, mismatched, float(row.good)

    def _check(self, tokens: int, where: str) -> None:
        if tokens >= self.sequence_length:
            raise DataError(
                f"{where}: two answers with their prompt have {tokens} tokens, and a sample has {self.sequence_length}",
                hint=f"use --data.sequence {-(-(tokens + 1) // 64) * 64}, or shorten the line",
            )

    def _encode(self, prompt: Text, answer: Text) -> Encoded:
        if isinstance(prompt, str) and isinstance(answer, str):
            return self._encode_text(prompt, answer)
        conversation = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        completion = (
            [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        )
        return self._encode_chat([*conversation, *completion], len(conversation))

    def _encode_text(self, prompt: str, answer: str) -> Encoded:
        before = self._tokenizer.encode(prompt)
        after = self._tokenizer.encode(answer, False)
        after = [*after, *sorted(self._tokenizer.eos_ids)[:1]]
        ids = np.asarray([*before, *after], np.int64)
        return ids, np.arange(len(ids)) >= len(before)

    def _encode_chat(self, messages: list[dict[str, Any]], prompt_messages: int) -> Encoded:
        """Only the answer is learnt, not what the assistant said before in the prompt."""
        self._chats = self._chats or ChatEncoder(self._tokenizer)
        weighted = [
            one | {"weight": 0} if at < prompt_messages and one.get("role") == "assistant" else one
            for at, one in enumerate(messages)
        ]
        encoded = self._chats.encode(weighted)
        return encoded.ids, encoded.learn


def _files(paths: Sequence[Path]) -> list[Path]:
    files = [
        file
        for path in paths
        for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])
    ]
    for file in files:
        if not file.is_file():
            raise DataError(
                f"there are no preferences at {file}", hint="name .jsonl files, or a folder of them"
            )
    return files


def _end(tokenizer: Tokenizer) -> int:
    """The token that scores an answer."""
    if not tokenizer.eos_ids:
        raise DataError(
            "the tokenizer has no end token, whose probability behind an answer is its score",
            hint="name its eos_token in tokenizer_config.json",
        )
    return min(tokenizer.eos_ids)


def _document(ids: np.ndarray, learn: np.ndarray, side: int, score_id: int | None) -> Document:
    tokens_T = torch.from_numpy(ids)
    targets_T = torch.full_like(tokens_T, IGNORED)
    if score_id is None:
        following_T = torch.from_numpy(learn[1:])
        targets_T[:-1] = torch.where(following_T, tokens_T[1:], IGNORED)
    else:
        targets_T[-1] = score_id
    return Document(tokens_T, targets_T, {SIDE: torch.full_like(tokens_T, side)})
