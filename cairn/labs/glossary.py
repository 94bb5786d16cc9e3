"""Short labels of plots and tables in Chinese: "ring of 8" -> "8 槽环".

Labs write the names of lines and the words in a table's cells in English only, because most of them are names, numbers
or code that read the same everywhere. The others are looked up here, with # for each number. Sentences are no labels:
they are `Words`, written twice by the lab itself.
"""

import re
import tomllib
from functools import cache
from importlib import resources
from types import MappingProxyType

from cairn.labs.lab import Words

NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


@cache
def labels() -> MappingProxyType[str, str]:
    text = resources.files("cairn.labs").joinpath("glossary.toml").read_text(encoding="utf-8")
    return MappingProxyType(tomllib.loads(text))


def label(text: str) -> Words:
    """A label in both languages; one that is not known is a name and stays as it is."""
    chinese = labels().get(NUMBER.sub("#", text))
    if chinese is None:
        return Words(text, text)
    numbers = iter(NUMBER.findall(text))
    return Words(text, re.sub("#", lambda place: next(numbers, place[0]), chinese))
