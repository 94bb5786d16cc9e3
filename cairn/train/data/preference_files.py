"""Preferences as people write them in files, one JSON object per line, with TRL's names.

    {"prompt": "...", "chosen": "...", "rejected": "..."}        or without prompt: what both begin with is the prompt
    {"prompt": "...", "completion": "...", "label": true}        single answers that are good or bad (KTO)
    a pair may say "margin": by how much a reward model has to score the chosen answer higher

Each text may be a list of messages ({"role", "content"}) instead. Anything else is refused with file and line. Knows
nothing about templates or tokens.
"""

from typing import Any, NamedTuple, TypeAlias

from cairn.core.errors import DataError
from cairn.train.data.documents import decode_line

Text: TypeAlias = "str | list[dict[str, Any]]"


class Pair(NamedTuple):
    prompt: Text
    chosen: Text
    rejected: Text
    margin: float = 0.0  # by how much the chosen one is better, where the data says so


class RatedAnswer(NamedTuple):
    prompt: Text
    completion: Text
    good: bool


def read_pair(line: bytes, where: str) -> Pair:
    row = _row(line, where)
    chosen, rejected = _text(row, "chosen", where), _text(row, "rejected", where)
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(
            f"{where}: chosen and rejected are not of one kind",
            hint="give two texts, or two lists of messages",
        )
    if "prompt" in row:
        prompt = _text(row, "prompt", where)
    else:
        length = _common(chosen, rejected)
        prompt, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
    if chosen == rejected:
        raise DataError(f"{where}: chosen and rejected are the same", hint="leave the line out")
    margin = row.get("margin", 0.0)
    if not isinstance(margin, int | float):
        raise DataError(f"{where}: margin is {margin!r}, not a number")
    return Pair(prompt, chosen, rejected, float(margin))


def read_judged(line: bytes, where: str) -> RatedAnswer:
    row = _row(line, where)
    prompt, completion = _text(row, "prompt", where), _text(row, "completion", where)
    good = row.get("label")
    if not isinstance(good, bool):
        raise DataError(f"{where}: label is {good!r}", hint="it is true or false")
    return RatedAnswer(prompt, completion, good)


def _row(line: bytes, where: str) -> dict[str, Any]:
    row = decode_line(line, where)
    if not isinstance(row, dict):
        raise DataError(f"{where} holds {type(row).__name__}, not an object")
    return row


def _text(row: dict[str, Any], name: str, where: str) -> Text:
    if name not in row:
        raise DataError(
            f"{where} has no {name}; it has the fields: {', '.join(map(str, row)) or 'none'}",
            hint="pairs have prompt, chosen and rejected; single answers prompt, completion and label",
        )
    value = row[name]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(_is_message(one) for one in value):
        return value
    raise DataError(f"{where}: {name} is neither a text nor a list of messages")


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and "role" in value and "content" in value


def _common(chosen: Text, rejected: Text) -> int:
    """Length of the common prefix; in texts the blank before the first difference belongs to the answers."""
    length = 0
    while length < min(len(chosen), len(rejected)) and chosen[length] == rejected[length]:
        length += 1
    if isinstance(chosen, str) and length and chosen[length - 1] == " ":
        length -= 1
    return length
