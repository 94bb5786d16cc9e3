"""Are these the same tokenizer? A hash of what it does, not of how its file is written.

Two tokenizers have the same hash when they have the same tokens under the same ids and split a probe text alike.
So a tokenizer keeps its hash when it is saved, loaded, or written by another version of its library, and one
with another vocabulary, other added tokens or another way to split has another.
"""

import hashlib

import numpy as np

from cairn.core.errors import DataError
from cairn.models.tokenizer import Tokenizer

# Case, accents in both forms, digits, spaces, line ends, signs, other scripts, code: where tokenizers differ.
_PROBE = (
    "The quick BROWN fox; it's 1234567 o'clock,  isn't it?\n\n\tdef f(x):\r\n    return x**2 != 3.14\n"
    "Größe naïve cafe\u0301 café Ελλάδα Привет 日本語 한국어 عربى 😀 ½ ﬁ \u00a0 <html> --flag=a_b  \n"
)


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """`sha256:` and 32 hexadecimal digits."""
    vocabulary = tokenizer.backend.get_vocab(with_added_tokens=True)
    digest = hashlib.sha256()
    for token, id in sorted(vocabulary.items(), key=lambda pair: (pair[1], pair[0])):
        digest.update(f"{id}:{token}\n".encode("utf-8", "surrogatepass"))
    digest.update(np.asarray(tokenizer.encode(_PROBE, special=False), dtype="<u4").tobytes())
    return f"sha256:{digest.hexdigest()[:32]}"


def id_limit(tokenizer: Tokenizer) -> int:
    """Largest id plus one; vocabularies may have gaps."""
    return max(tokenizer.backend.get_vocab(with_added_tokens=True).values()) + 1


def check_same(recorded: str | None, expected: Tokenizer, where: str, made_with: str = "") -> None:
    """Refuse tokens that another tokenizer made; their ids would mean other words."""
    if recorded is None:
        return  # formats of others do not say
    mine = tokenizer_hash(expected)
    if recorded != mine:
        by = f" ({made_with})" if made_with else ""
        raise DataError(
            f"{where} was made with another tokenizer: {recorded}{by}, not {mine} of {expected.source}",
            hint="tokenize the text again with this tokenizer; weights that are new can learn the store's own",
        )
