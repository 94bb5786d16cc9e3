"""Why was so little of a prompt found in the prefix cache? Compares it with the prompts that came before. Pure Python.

    hit          all that could be found was found
    short        the prompt has no whole page besides its last token: nothing can be found
    never seen   no prompt before began like this
    at once      a prompt that begins like this ran at the same time, and its pages came too late
    evicted      a prompt before began like this, and its pages have been taken for something else since
    changed      the prompt is that of an earlier one up to token N, and another from there on
    new text     an earlier prompt is the beginning of this one: the rest is new
    salt         the same prompt is known under another salt or adapter, whose pages are never shared

Chunks of tokens are known by a hash of all tokens up to their end, without the salt. Bounded: the newest prompts are
remembered, with their tokens, which leave this object only as a number and, if asked for, as a few tokens around it.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

Cause = Literal[
    "hit", "short", "never seen", "at once", "evicted", "changed", "new text", "salt", "off"
]
CHUNK = 64  # tokens that one hash stands for
PROMPTS = 512
TOKENS = 1_000_000  # of all prompts that are remembered
AROUND = 6  # tokens on each side of a change


class EarlierPrompt(NamedTuple):
    """A prompt that came before."""

    prompt: Sequence[int]
    owner: bytes  # salt and identity: pages are shared within one of them
    at: float


class Miss(NamedTuple):
    cause: Cause
    known: int = 0  # tokens of the prompt that a prompt before had, too
    age_s: float | None = None  # of that prompt
    before: tuple[int, ...] = ()  # tokens of the other prompt around the change
    now: tuple[int, ...] = ()  # and of this one


class PrefixHistory:
    def __init__(self, page_size: int, prompts: int = PROMPTS, tokens: int = TOKENS) -> None:
        self.page_size, self._prompts, self._tokens = page_size, prompts, tokens
        self._seen: OrderedDict[int, EarlierPrompt] = OrderedDict()  # by number, oldest first
        self._held = 0  # tokens in it
        self._next = 0
        self._by_hash: dict[int, list[int]] = {}  # which prompts have this chunk

    def explain(
        self,
        prompt: Sequence[int],
        owner: bytes,
        cached: int,
        now: float,
        arrived: float = math.inf,
    ) -> Miss:
        """`cached`: tokens that the engine found. The prompt is remembered by `add`, at its end."""
        most = (len(prompt) - 1) // self.page_size * self.page_size
        if most == 0:
            return Miss("short")
        if cached >= most:
            return Miss("hit", cached)
        matches = self._longest(prompt)
        own = [(n, earlier) for n, earlier in matches if earlier.owner == owner]
        other = [(n, earlier) for n, earlier in matches if earlier.owner != owner]
        shared, earlier = max(own, key=_by_length, default=(0, None))
        apart, stranger = max(other, key=_by_length, default=(0, None))
        if stranger is not None and self._pages(apart) > max(self._pages(shared), cached):
            return Miss("salt", apart, now - stranger.at)
        if earlier is None or not self._pages(shared):
            return Miss("never seen", shared)
        if self._pages(shared) > cached:
            return Miss("at once" if earlier.at > arrived else "evicted", shared, now - earlier.at)
        if shared >= len(earlier.prompt):
            return Miss("new text", shared, now - earlier.at)
        around = slice(max(shared - AROUND, 0), shared + AROUND)
        before, after = tuple(earlier.prompt[around]), tuple(prompt[around])
        return Miss("changed", shared, now - earlier.at, before, after)

    def add(self, prompt: Sequence[int], owner: bytes, now: float) -> None:
        number, self._next = self._next, self._next + 1
        self._seen[number] = EarlierPrompt(prompt, owner, now)
        self._held += len(prompt)
        for digest in _hashes(prompt):
            self._by_hash.setdefault(digest, []).append(number)
        while len(self._seen) > self._prompts or self._held > self._tokens:
            self._forget()

    def _forget(self) -> None:
        number, oldest = self._seen.popitem(last=False)
        self._held -= len(oldest.prompt)
        for digest in _hashes(oldest.prompt):
            numbers = self._by_hash[digest]
            numbers.remove(number)
            if not numbers:
                del self._by_hash[digest]

    def _pages(self, tokens: int) -> int:
        return tokens // self.page_size * self.page_size

    def _longest(self, prompt: Sequence[int]) -> list[tuple[int, EarlierPrompt]]:
        """The prompts of each owner with the longest common prefix, and its length; newest last."""
        best: dict[bytes, tuple[int, EarlierPrompt]] = {}
        deepest: list[int] = []
        chunks = 0
        for digest in _hashes(prompt):
            numbers = self._by_hash.get(digest)
            if numbers is None:
                break
            deepest, chunks = numbers, chunks + 1
            for number in numbers[-4:]:  # the newest of each chunk stand for the rest
                earlier = self._seen[number]
                best[earlier.owner] = (chunks * CHUNK, earlier)
        tried = deepest[-16:] if chunks else list(self._seen)[-32:]
        for number in tried:
            earlier = self._seen[number]
            shared = common_length(earlier.prompt, prompt, chunks * CHUNK)
            if shared >= best.get(earlier.owner, (0, earlier))[0]:
                best[earlier.owner] = (shared, earlier)
        return list(best.values())


def common_length(a: Sequence[int], b: Sequence[int], start: int = 0) -> int:
    """Length of the common prefix of two prompts, of which `start` tokens are known to be equal."""
    most = min(len(a), len(b))
    at = min(start, most)
    while at < most and a[at] == b[at]:
        at += 1
    return at


def _hashes(prompt: Sequence[int]) -> Iterator[int]:
    """Rolling hashes of the prompt at the end of each whole chunk."""
    digest = 0
    for end in range(CHUNK, len(prompt) + 1, CHUNK):
        digest = hash((digest, *prompt[end - CHUNK : end]))
        yield digest


def _by_length(pair: tuple[int, EarlierPrompt]) -> tuple[int, float]:
    return pair[0], pair[1].at


def sentence(miss: Miss, words: tuple[str, str] | None = None) -> str:
    """`words`: the text around a change, before and now, if it may be shown."""
    age = "" if miss.age_s is None else f"{miss.age_s:.0f} s ago"
    match miss.cause:
        case "evicted":
            return f"{miss.known} tokens were known {age}, and have been evicted since"
        case "at once":
            return f"{miss.known} tokens are those of a request that ran at the same time"
        case "short":
            return "the prompt has no whole page that could be found"
        case "changed":
            change = f": {words[0]!r} became {words[1]!r}" if words else ""
            return f"the prompt of {age} is the same up to token {miss.known} and changed there{change}"
        case "new text":
            return f"the first {miss.known} tokens were known, the rest is new"
        case "salt":
            return f"{miss.known} tokens are known under another salt or adapter, whose pages are not shared"
        case "never seen":
            return "no prompt that is remembered begins like this"
        case "off":
            return "the prefix cache is off, or the request needs its whole prompt"
        case "hit":
            return "all that could be found was found"
