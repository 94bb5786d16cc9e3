"""Opens a data source by name; the only module that knows all source types.

    stories, arithmetic, chats     made up as they are needed
    a token store of chats         whole chats, packed by best fit, the assistant's words learnt
    any other store, Megatron,
    llm.c                          windows over the stream of documents
    parquet files                  tokenized as they are read
    text, jsonl                    tokenized once, into a store that is kept with the run

Each can be opened in part, so that some of it is kept apart for validation. `corpus` decides which tokenizer reads it.
"""

from collections.abc import Sequence
from pathlib import Path

from cairn.core.errors import ConfigError, did_you_mean
from cairn.hw.storage import cache_folder
from cairn.models.tokenizer import Tokenizer
from cairn.train.data import procedural
from cairn.train.data.blend import Blend
from cairn.train.data.counter_rng import mix
from cairn.train.data.open_tokens import open_tokens
from cairn.train.data.packed_documents import PackedDocuments
from cairn.train.data.packing import TooLong
from cairn.train.data.raw_text import is_raw, store_of
from cairn.train.data.source import Source
from cairn.train.data.store import Store
from cairn.train.data.text_files import find_files
from cairn.train.data.tokenizer_identity import check_same
from cairn.train.data.windows import Windows

Span = tuple[float, float]  # a part of the samples: from where to where, of 1
ALL: Span = (0.0, 1.0)


def open_source(
    name: str,
    tokenizer: Tokenizer,
    sequence_length: int,
    seed: int = 0,
    *,
    boundaries: bool = True,
    too_long: TooLong = "refuse",
    column: str = "text",
    span: Span = ALL,
    cache: Path | None = None,
) -> Source:
    """Open a source or its part `span`; raises for tokens of another tokenizer.

    `cache`: where the stores of text files are kept; by default in Cairn's cache folder.
    """
    if name in procedural.NAMES:
        held_out = span[0] > 0
        return procedural.Procedural(
            name, tokenizer, sequence_length, seed, boundaries, held_out=held_out
        )
    path = Path(name)
    if not path.exists() and not path.with_name(path.name + ".idx").exists():
        hint = did_you_mean(name, procedural.NAMES, otherwise="check the path")
        raise ConfigError(f"there is no data at {name!r}", hint=hint)
    if is_parquet(path):
        return _parquet(path, tokenizer, sequence_length, seed, column, boundaries, span)
    if is_raw(path):
        path = store_of(path, tokenizer, cache or cache_folder() / "text", column)
    tokens = open_tokens(path)
    made_with = tokens.header.made_with if isinstance(tokens, Store) else ""
    check_same(tokens.tokenizer, tokenizer, str(path), made_with)
    if tokens.has_mask:
        pad = tokenizer.pad_id if tokenizer.pad_id is not None else (*tokenizer.eos_ids, 0)[0]
        return PackedDocuments(
            tokens, sequence_length, seed, pad_id=pad, too_long=too_long, span=span
        )
    return Windows(tokens, sequence_length, seed, boundaries=boundaries, span=span, name=name)


def _parquet(
    path: Path,
    tokenizer: Tokenizer,
    sequence_length: int,
    seed: int,
    column: str,
    boundaries: bool,
    span: Span,
) -> Source:
    from cairn.train.data.parquet_stream import ParquetStream

    files = [file for file in find_files([path]) if file.kind == "parquet"]
    key = mix(*f"{path.absolute()} {span}".encode())
    counts = cache_folder() / "parquet" / f"{key:016x}.json"
    return ParquetStream(
        files,
        tokenizer,
        sequence_length,
        seed,
        column=column,
        boundaries=boundaries,
        counts=counts,
        span=span,
    )


def open_blend(
    names: Sequence[str],
    weights: Sequence[float],
    tokenizer: Tokenizer,
    sequence_length: int,
    seed: int = 0,
    *,
    boundaries: bool = True,
    too_long: TooLong = "refuse",
    column: str = "text",
    span: Span = ALL,
    cache: Path | None = None,
) -> Source:
    """Several sources by weight, alike where no weights are given."""
    if not names:
        raise ConfigError("there is no data to train on", hint='name a source, such as "stories"')
    sources = [
        open_source(
            name,
            tokenizer,
            sequence_length,
            seed,
            boundaries=boundaries,
            too_long=too_long,
            column=column,
            span=span,
            cache=cache,
        )
        for name in names
    ]
    if len(sources) == 1:
        return sources[0]
    return Blend(sources, weights or [1.0] * len(sources), names)


def own_tokenizer(name: str) -> Tokenizer | None:
    """The tokenizer that a source brings with it; None where it has none."""
    path = Path(name)
    if name in procedural.NAMES or not path.is_dir() or is_parquet(path) or is_raw(path):
        return None
    tokens = open_tokens(path)
    return tokens.own_tokenizer() if isinstance(tokens, Store) else None


def is_parquet(path: Path) -> bool:
    return path.suffix == ".parquet" or (path.is_dir() and any(path.glob("*.parquet")))
