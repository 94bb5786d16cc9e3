"""Training straight from local parquet files: row groups are tokenized when their turn comes.

    row groups, shuffled for each epoch   [ 7 ]      [ 2 ]        [ 5 ]   ...
    tokens, when they are needed          |..........|............|.....
    samples                               |-- 0 --|-- 1 --|-- 2 --|--

Sample i is still a pure function of i: windows over the epoch's row groups in their shuffled order, where the last
window of an epoch is filled up from its first row group. To find sample i the token counts of the row groups before
it must be known; they are learnt as the stream goes, and kept in `counts` so that a resume need not tokenize what
lies behind it. Every rank tokenizes for itself: for many ranks or many epochs, `cairn data tokenize` once is cheaper.
"""

import contextlib
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cairn.core.errors import ConfigError, DataError
from cairn.models.tokenizer import Tokenizer
from cairn.train.data.counter_rng import mix
from cairn.train.data.documents import check_column
from cairn.train.data.shuffle import permute
from cairn.train.data.source import cut
from cairn.train.data.text_files import TextFile
from cairn.train.data.tokenizer_identity import tokenizer_hash
from cairn.train.data.windows import IGNORED

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch

KEPT = 4  # row groups whose tokens stay in memory


class Group(NamedTuple):
    path: Path
    number: int  # within the file
    rows: int
    bytes: int  # of all its columns


class Tokenized(NamedTuple):
    ids: np.ndarray
    ends: np.ndarray  # where documents end


class ParquetStream:
    """A Source over parquet files."""

    def __init__(
        self,
        files: Sequence[TextFile],
        tokenizer: Tokenizer,
        sequence_length: int,
        seed: int = 0,
        *,
        column: str = "text",
        boundaries: bool = True,
        counts: Path | None = None,
        span: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        """`span`: the part of the row groups to use, as of `Windows`."""
        if not tokenizer.eos_ids:
            raise ConfigError(f"{tokenizer.source} has no end-of-text token to end documents with")
        self.sequence_length = sequence_length
        self._tokenizer, self._seed, self._column = tokenizer, seed, column
        self._boundaries = boundaries
        self._groups = [group for file in files for group in _row_groups(file.path, column)]
        if not self._groups:
            raise DataError(f"{files[0].path if files else 'the list of files'} has no rows")
        self._groups = _part(self._groups, span)
        names = [[group.path.name, *group[1:]] for group in self._groups]
        self.fingerprint = (
            f"parquet {mix(*json.dumps(names).encode()):016x}, {column}, seed {seed}, "
            f"{sequence_length} tokens by {tokenizer_hash(tokenizer)}, boundaries {boundaries}"
        )
        self._counts = _Counts(counts, self.fingerprint, len(self._groups))
        self._recent: OrderedDict[int, Tokenized] = OrderedDict()

    @property
    def samples_per_epoch(self) -> int | None:
        """Known once every row group has been read."""
        total = self._counts.total()
        return None if total is None else -(-total // self.sequence_length)

    def batch(self, number: int) -> "Batch":
        import torch

        from cairn.train.data.batch import make_batch

        epoch, start = self._place(number)
        ids, ends = self._take(epoch, start, self.sequence_length + 1)
        targets = ids[1:].copy()
        inner = ends[ends <= self.sequence_length]
        if self._boundaries:
            targets[inner - 1] = IGNORED
        edges = np.unique([0, *inner, self.sequence_length]) if self._boundaries else None
        lengths = [self.sequence_length] if edges is None else np.diff(edges).tolist()
        return make_batch(torch.from_numpy(ids[:-1]), torch.from_numpy(targets), lengths, [number])

    def _place(self, number: int) -> tuple[int, int]:
        """(epoch, first token in it) of a sample."""
        samples = self.samples_per_epoch
        if samples is None:  # within the first epoch, unless reading shows otherwise
            before = 0
            for place in range(len(self._groups)):
                before += self._count(self._at(0, place))
                if before > number * self.sequence_length:
                    return 0, number * self.sequence_length
            samples = self.samples_per_epoch or 1
        if not self._counts.total():
            raise DataError(f"the parquet files have no text in column {self._column!r}")
        epoch, item = divmod(number, samples)
        return epoch, item * self.sequence_length

    def _at(self, epoch: int, place: int) -> int:
        """The row group at a place of an epoch's order."""
        return permute(place, len(self._groups), mix(self._seed, epoch))

    def _take(self, epoch: int, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """`wanted` tokens from `start` of an epoch, going round at its end, and where documents end in them."""
        parts: list[np.ndarray] = []
        ends: list[np.ndarray] = []
        place, have = 0, 0
        while have < count:
            group = self._at(epoch, place % len(self._groups))
            place += 1
            if start >= self._count(group):
                start -= self._count(group)
                continue
            tokens = self._tokens(group)
            part = tokens.ids[start : start + count - have]
            inside = tokens.ends[(tokens.ends > start) & (tokens.ends <= start + len(part))]
            ends.append(inside - start + have)
            parts.append(part)
            have += len(part)
            start = 0
        return np.concatenate(parts), np.concatenate(ends)

    def _count(self, group: int) -> int:
        length = self._counts.get(group)
        return len(self._tokens(group).ids) if length is None else length

    def _tokens(self, group: int) -> Tokenized:
        if group in self._recent:
            self._recent.move_to_end(group)
            return self._recent[group]
        tokens = self._tokenize(self._groups[group])
        self._counts.put(group, len(tokens.ids))
        self._recent[group] = tokens
        if len(self._recent) > KEPT:
            self._recent.popitem(last=False)
        return tokens

    def _tokenize(self, group: Group) -> Tokenized:
        texts = _read(group, self._column)
        end = self._tokenizer.eos_ids[0]
        documents = [[*ids, end] for ids in self._tokenizer.encode_batch(texts)]
        ends = np.cumsum([len(ids) for ids in documents], dtype=np.int64)
        ids = np.asarray([id for document in documents for id in document], np.int64)
        return Tokenized(ids, ends)


def _part(groups: list[Group], span: tuple[float, float]) -> list[Group]:
    """Row groups of a part; both parts get at least one if there are two."""
    if span == (0.0, 1.0):
        return groups
    if len(groups) < 2:
        raise ConfigError(
            f"{groups[0].path} has one row group, of which no part can be kept apart",
            hint="write it with more row groups, or name other data with validation.sources",
        )
    first, stop = (cut(part, len(groups)) for part in span)
    return groups[first:stop]


class _Counts:
    """Tokens of each row group, as far as they are known; kept in a file where one is named."""

    def __init__(self, path: Path | None, key: str, groups: int) -> None:
        self._path, self._key = path, key
        self._known: dict[int, int] = {}
        self._groups = groups
        if path is not None and path.is_file():
            try:
                saved = json.loads(path.read_text(encoding="utf-8"))
                if saved["key"] == key:
                    self._known = {
                        int(group): int(count) for group, count in saved["counts"].items()
                    }
            except (ValueError, KeyError, OSError, AttributeError):
                self._known = {}  # it can be learnt again

    def get(self, group: int) -> int | None:
        return self._known.get(group)

    def total(self) -> int | None:
        return sum(self._known.values()) if len(self._known) == self._groups else None

    def put(self, group: int, count: int) -> None:
        if group in self._known:
            return
        self._known[group] = count
        if self._path is None:
            return
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}.unfinished")
        content = json.dumps({"key": self._key, "counts": self._known})
        with contextlib.suppress(OSError):  # without the file a resume takes longer, no more
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fresh.write_text(content, encoding="utf-8")
            fresh.replace(self._path)


def _row_groups(path: Path, column: str) -> list[Group]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            check_column(path, table.schema_arrow, column)
            groups = [table.metadata.row_group(at) for at in range(table.num_row_groups)]
            sizes = [(group.num_rows, group.total_byte_size) for group in groups]
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path} cannot be read as parquet: {error}", hint="copy it again"
        ) from None
    return [Group(path, number, *size) for number, size in enumerate(sizes) if size[0]]


def _read(group: Group, column: str) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(group.path) as table:
            texts = table.read_row_group(group.number, columns=[column]).column(0).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        where = f"row group {group.number} of {group.path}"
        raise DataError(f"{where} cannot be read: {error}", hint="copy the file again") from None
    return [text for text in texts if text]
