"""The text that a model is calibrated and judged with, as windows of tokens.

    FILE.txt      one document
    FILE.jsonl    one document a line: {"text": ...} or {"messages": [...]}, the latter through the chat template
    STORE         tokens that `cairn data tokenize` made, with this model's tokenizer
    (nothing)     the English texts of the labs, which ship with Cairn: some 28,000 tokens of prose

The first windows calibrate, the ones behind them are kept apart to judge the result.
"""

import json
import random
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cairn.core.errors import ConfigError, DataError
from cairn.models.tokenizer import Tokenizer
from cairn.train.data.open_tokens import is_tokens, open_tokens
from cairn.train.data.tokenizer_identity import check_same
from cairn.train.data.tokens import count

SHIPPED = "the texts of the labs"


class CalibrationText(NamedTuple):
    """Windows of tokens, [B, L] each."""

    calibration_BL: Tensor
    held_out_BL: Tensor
    notes: list[str]


def read_text(
    data: Path | None,
    judged: Path | None,
    tokenizer: Tokenizer,
    vocab: int,
    *,
    samples: int,
    length: int,
    held_out: int,
) -> CalibrationText:
    """`judged`: a text of its own to judge with; by default the end of `data`."""
    if length < 2:
        raise ConfigError(
            f"a window of {length} token predicts none",
            hint="use --length 2 or more; usual: 512 to 2,048",
        )
    ids = token_ids(data, tokenizer, vocab)
    whole = windows(ids, length, str(data or SHIPPED))
    notes = []
    if judged is not None:
        kept_BL = windows(token_ids(judged, tokenizer, vocab), length, str(judged))[:held_out]
    else:
        share = max(1, min(held_out, len(whole) // 5))
        if len(whole) < 2:
            raise DataError(
                f"{data or SHIPPED} has {len(ids)} tokens, and two windows of {length} are the least",
                hint="use more text, or a smaller --length",
            )
        whole, kept_BL = whole[:-share], whole[-share:]
    if len(whole) < samples:
        notes.append(
            f"{len(whole)} windows of {length} tokens calibrate, because {data or SHIPPED} has no more than that"
        )
    return CalibrationText(whole[:samples], kept_BL, notes)


def windows(ids: list[int], length: int, where: str) -> Tensor:
    """Whole windows of a text, one behind another."""
    whole = len(ids) // length
    if whole == 0:
        raise DataError(
            f"{where} has {len(ids)} tokens, fewer than one window of {length}",
            hint="use more text, or a smaller --length",
        )
    return torch.tensor(ids[: whole * length]).view(whole, length)


def token_ids(path: Path | None, tokenizer: Tokenizer, vocab: int) -> list[int]:
    """All documents one behind another, with an end of text between them where the model knows one."""
    if path is not None and not path.exists():
        raise DataError(f"there is no data at {path}", hint="check the path")
    if path is not None and is_tokens(path):
        return _stored_ids(path, tokenizer, vocab)
    texts = list(shipped_texts()) if path is None else list(_file_texts(path, tokenizer))
    if not any(text.strip() for text in texts):
        raise DataError(f"{path} has no text", hint="a calibration file holds some pages of prose")
    between = list(tokenizer.eos_ids[:1])
    ids: list[int] = []
    for encoded in tokenizer.encode_batch(texts):
        ids += [*encoded, *between]
    return ids


def shipped_texts() -> Iterator[str]:
    """The English sentences of each lab, in an order that mixes topics."""
    documents = []
    for path in _toml_files(files("cairn.labs")):
        sentences = _english(tomllib.loads(path.read_text(encoding="utf-8")))
        documents.append("\n\n".join(sentences))
    random.Random(0).shuffle(documents)
    return (text for text in documents if text)


def _toml_files(folder: Traversable) -> list[Traversable]:
    found: list[Traversable] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            found += _toml_files(entry)
        elif entry.name.endswith(".toml"):
            found.append(entry)
    return found


def _english(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "en" and isinstance(inner, str):
                yield inner
            else:
                yield from _english(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _english(inner)


def _file_texts(path: Path, tokenizer: Tokenizer) -> Iterator[str]:
    if path.is_dir():
        raise DataError(f"{path} is a folder without tokens", hint="name a .txt or .jsonl file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}",
            hint="--data takes .txt, .jsonl or a token store",
        ) from None
    if path.suffix != ".jsonl":
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):  # a text may hold other ends of lines
        if line.strip():
            yield _document(line, f"{path} line {number}", tokenizer)


def _document(line: str, where: str, tokenizer: Tokenizer) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}", hint="one object a line") from None
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return record["text"]
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        return tokenizer.chat(record["messages"], add_generation_prompt=False)
    raise DataError(f'{where} has neither "text" nor "messages"', hint='such as {"text": "..."}')


def _stored_ids(path: Path, tokenizer: Tokenizer, vocab: int) -> list[int]:
    tokens = open_tokens(path)
    check_same(tokens.tokenizer, tokenizer, str(path))
    ids = tokens.read(0, count(tokens)).tolist()
    if ids and max(ids) >= vocab:
        raise DataError(
            f"{path} has token {max(ids)}, the model knows {vocab} tokens",
            hint="tokenize the text with this model's tokenizer",
        )
    return ids
