"""Request traces of real services: arrival times and lengths, without texts.

    Mooncake (JSONL)   {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}
                       milliseconds; each id stands for 512 tokens, and equal ids for equal tokens: prefixes are shared
    Azure (CSV)        TIMESTAMP,ContextTokens,GeneratedTokens
                       2023-11-16 18:15:46.6805900,374,44               of 2023
                       2024-05-10 00:00:00.009930+00:00,2162,5          of 2024; whole seconds have no fraction

Which of the two a file is, is seen from its first line. A line that is wrong is an error with its number: a trace that
loses lines is another trace. Pure but for reading the file.
"""

import csv
import datetime
import io
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import msgspec

from cairn.core.errors import DataError, system_words

BLOCK_TOKENS = 512  # of Mooncake's hashes
STAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TracedRequest(msgspec.Struct, frozen=True):
    """A request of a trace."""

    at_s: float  # after the first
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # names of its blocks of 512 tokens, where the trace knows them


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, most: int | None = None) -> list[TracedRequest]:
    """The requests in order of time, the first at 0; at most `most` lines are read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read the trace {path}: {system_words(error)}",
            hint="a JSONL file of Mooncake or a CSV file of Azure",
        ) from None
    read = parse_mooncake if text.lstrip().startswith("{") else parse_azure
    requests = list(itertools.islice(read(text, str(path)), most))
    if not requests:
        raise DataError(f"the trace {path} has no requests", hint="is it complete?")
    requests.sort(key=lambda request: request.at_s)  # stable: equal times keep their order
    first = requests[0].at_s
    return [msgspec.structs.replace(request, at_s=request.at_s - first) for request in requests]


def parse_mooncake(text: str, where: str = "trace") -> Iterator[TracedRequest]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=_Mooncake)
        except msgspec.DecodeError as error:
            _refuse(where, number, str(error))
        yield _checked(
            where,
            number,
            row.timestamp / 1000,
            row.input_length,
            row.output_length,
            row.hash_ids,
        )


def parse_azure(text: str, where: str = "trace") -> Iterator[TracedRequest]:
    rows = csv.DictReader(io.StringIO(text))
    missing = [name for name in AZURE_COLUMNS if name not in (rows.fieldnames or ())]
    if missing:
        _refuse(where, 1, f"no column {', '.join(missing)}")
    for number, row in enumerate(rows, start=2):
        try:
            moment, read, written = (row[name] for name in AZURE_COLUMNS)
            yield _checked(where, number, _seconds(moment), int(read), int(written))
        except (TypeError, ValueError) as error:
            _refuse(where, number, str(error))


def _seconds(stamp: str) -> float:
    """Parse "2023-11-16 18:15:46.6805900" (seven digits, Python keeps six); without a zone it is UTC."""
    match = STAMP.fullmatch(stamp.strip())
    if match is None:
        raise ValueError(f"'{stamp}' is no time")
    whole, fraction, zone = match.groups(default="")
    moment = datetime.datetime.fromisoformat(whole + (zone or "+00:00"))
    return moment.timestamp() + float(f"0{fraction}")


def _checked(
    where: str, number: int, at_s: float, read: int, written: int, blocks: tuple[int, ...] = ()
) -> TracedRequest:
    if read < 1 or written < 0:
        _refuse(where, number, f"{read} tokens in and {written} out")
    if blocks and len(blocks) != -(-read // BLOCK_TOKENS):
        _refuse(where, number, f"{len(blocks)} blocks of {BLOCK_TOKENS} tokens for {read} tokens")
    # A server cannot be asked for an answer of no tokens.
    return TracedRequest(at_s, read, max(written, 1), blocks)


def _refuse(where: str, number: int, why: str) -> NoReturn:
    raise DataError(
        f"{where} line {number}: {why}",
        hint="a line of Mooncake's JSONL or of Azure's CSV, see `cairn bench serve --help`",
    ) from None
