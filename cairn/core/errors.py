"""The exceptions for what a user can mend, as one small tree.

    CairnError
    ├── UsageError             a flag or an argument is wrong
    ├── ConfigError            a TOML file, an environment variable or a pair of values is wrong
    ├── DataError              a data file is damaged, or is not what its name promises
    ├── ModelError
    │   ├── ModelNotFound      no such path, nothing in the cache, no network
    │   ├── UnsupportedModel   an architecture or a field that would be computed wrongly
    │   ├── WeightsError       a damaged file, a wrong shape, a missing or an extra tensor
    │   └── TokenizerError     no tokenizer, no chat template, a template that fails
    ├── RequestError           a prompt or a parameter that this model cannot serve
    └── HardwareError          the machine lacks what was asked for

Each says what is wrong, with which values, and what to do next (`hint`). The command line prints
both and leaves with `exit_status`; everything that is not a CairnError is a bug and keeps its
traceback. This module knows nothing about terminals.
"""

from collections.abc import Iterable


class CairnError(Exception):
    """A mistake in what was asked, or a machine that cannot do it: what, values, and a way out."""

    exit_status = 2

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (hint: {self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[type, tuple[str, str | None]]:
        return type(self), (self.message, self.hint)  # survives the way back from a worker process


class UsageError(CairnError):
    pass


class ConfigError(CairnError):
    pass


class DataError(CairnError):
    pass


class ModelError(CairnError):
    pass


class ModelNotFound(ModelError):
    pass


class UnsupportedModel(ModelError):
    pass


class WeightsError(ModelError):
    pass


class TokenizerError(ModelError):
    pass


class RequestError(CairnError):
    pass


class HardwareError(CairnError):
    pass


LONGEST_WORD = 200  # that is compared with names: a server is sent longer ones to keep it busy


def closest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` was most likely meant to be, or None when nothing is near.

    Besides spelling it knows two habits: to abbreviate (`max` for `max_tokens`) and to leave out
    the table (`lr` for `optim.lr`). A guess is near if one letter is wrong, or a third of them behind
    the first: a worse one sends its reader somewhere else.
    """
    if len(word) > LONGEST_WORD:
        return None
    import difflib  # only a mistake pays for it

    choices = list(choices)
    for is_meant in (
        lambda choice: choice.rpartition(".")[2] == word,
        lambda choice: len(word) >= 3 and choice.startswith(word),
    ):
        matches = [choice for choice in choices if is_meant(choice)]
        if len(matches) == 1:
            return matches[0]
    guess = next(iter(difflib.get_close_matches(word, choices, n=1)), None)
    if guess is None:
        return None
    if guess.startswith(word) or word.startswith(guess):  # optimizer for optim, TB for TB/s
        return guess
    most = (max(len(word), len(guess)) + 2) // 3 if guess[:1] == word[:1] else 1
    return guess if edit_distance(word, guess) <= most else None


def edit_distance(one: str, other: str) -> int:
    """Letters to insert, to delete, to replace or to exchange with their neighbour until both are the same."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, last, row = row, before, [i]
        for j, wanted in enumerate(other, 1):
            least = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                least = min(least, last[j - 2] + 1)
            row.append(least)
    return row[-1]


def did_you_mean(word: str, choices: Iterable[str], otherwise: str | None = None) -> str | None:
    """A hint that names the closest choice, or `otherwise` when nothing is near."""
    match = closest(word, choices)
    return f"did you mean '{match}'?" if match is not None else otherwise


def system_words(error: BaseException) -> str:
    """The words "connection refused" of an error that says "<urlopen error [Errno 111] Connection refused>"."""
    import os
    import ssl

    cause = getattr(error, "reason", error)
    number = getattr(cause, "errno", None) or 0
    # Those below 0 are of the resolver, which has words of its own, as OpenSSL has, whose numbers are no errno either.
    if number > 0 and not isinstance(cause, ssl.SSLError):
        return os.strerror(number).lower()
    return str(cause) or type(cause).__name__
