"""Grades a typed answer by a rubric: key facts by any of their wordings, numbers with a tolerance.

    point = {"need": ["memory", "bandwidth"]}     one of these words or phrases
    point = {"number": 147456, "within": 0.05}    a number near it, with or without commas, k, M, G, KiB, MiB, GiB, %

Words are compared without case and without plural endings, Chinese by plain containment. This is a help for practice:
it sees whether the facts are there, not whether the sentence is right. Pure.
"""

import math
import re
from collections.abc import Sequence

import msgspec

NUMBER = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)\s*(%|[kKMGT]i?B?\b|万|亿|us|ms|s\b)?")
CHINESE = re.compile(r"[\u4e00-\u9fff]")
SIZES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "万": 1e4, "亿": 1e8}
SIZES |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
ENOUGH = 0.6  # share of the points that makes an answer right


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One thing that a good answer has."""

    need: list[str] = []  # any of these
    number: float | None = None
    within: float = 0.05

    def said(self) -> str:
        return " / ".join(self.need) if self.need else f"{self.number:g}"


class Graded(msgspec.Struct, frozen=True, kw_only=True):
    found: list[str]
    missing: list[str]

    @property
    def share(self) -> float:
        total = len(self.found) + len(self.missing)
        return len(self.found) / total if total else 0.0

    @property
    def right(self) -> bool:
        return self.share >= ENOUGH


def grade_answer(answer: str, points: Sequence[Point]) -> Graded:
    """Which points the answer has."""
    words, numbers = _stems(answer), numbers_in(answer)
    matched, missing = [], []
    for point in points:
        (matched if _has(point, answer, words, numbers) else missing).append(point.said())
    return Graded(found=matched, missing=missing)


def worded(point: str, language: str) -> str:
    """A point as a learner of one language reads it: only the wordings of that language, where there are any."""
    wordings = point.split(" / ")
    wanted = [one for one in wordings if bool(CHINESE.search(one)) == (language == "zh")]
    return " / ".join(wanted or wordings)


def numbers_in(text: str) -> list[float]:
    """Every number of a text: 147,456 is one, 144 KiB is 147456 as well as 144."""
    numbers: list[float] = []
    for digits, unit in NUMBER.findall(text):
        value = float(digits.replace(",", ""))
        numbers.append(value)
        if size := SIZES.get(unit.removesuffix("B")):
            numbers.append(value * size)
        if unit == "%":
            numbers.append(value / 100)
    return numbers


def _has(point: Point, answer: str, words: set[str], numbers: Sequence[float]) -> bool:
    if point.number is not None:
        return any(math.isclose(one, point.number, rel_tol=point.within) for one in numbers)
    return any(_contains(need, answer, words) for need in point.need)


def _contains(need: str, answer: str, words: set[str]) -> bool:
    if CHINESE.search(need) or not re.fullmatch(r"[\w-]+", need):
        return need.lower() in answer.lower()
    return _stem(need.lower()) in words


def _stems(text: str) -> set[str]:
    """Of each word, and of the parts of one with a hyphen."""
    words = re.findall(r"[a-z][\w-]*", text.lower())
    return {_stem(part) for word in words for part in (word, *word.split("-"))}


def _stem(word: str) -> str:
    """queues, queued, queueing and queue are one word."""
    for end in ("ations", "ation", "ings", "ing", "ed", "es", "s"):
        if word.endswith(end) and len(word) - len(end) >= 4:
            word = word[: -len(end)]
            break
    return word.rstrip("e")
