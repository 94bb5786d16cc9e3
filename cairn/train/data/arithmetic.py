"""Sums with answers that a program can check: endless, seeded, problem `number` is a pure function of its number.

    What is 47 + 38?        ->   47 + 38 = 85. The answer is 85.
    Mia has 12 shells ...   ->   12 + 7 = 19. 19 - 5 = 14. The answer is 14.

`is_right` is the judge: it reads the last number of an answer, however it is worded.
"""

import re
from typing import NamedTuple

from cairn.train.data.counter_rng import Dice, words

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_NAMES = words("Mia Tom Anna Ben Zoe Leo Nora Sam Ruby Finn")
_THINGS = words("apples shells books coins stones cards stamps pencils marbles cookies")


class Problem(NamedTuple):
    question: str
    working: str  # how to get there, one step per sentence
    answer: int

    @property
    def solution(self) -> str:
        """The working and the answer, as an assistant would write them."""
        return f"{self.working} The answer is {self.answer}."

    @property
    def text(self) -> str:
        """Question and solution as one document."""
        return f"Question: {self.question}\nAnswer: {self.solution}"


def problem(seed: int, number: int) -> Problem:
    """Problem `number` of the endless book `seed`."""
    dice = Dice(seed, number, 2)
    kind = dice.pick((_add, _add, _subtract, _multiply, _divide, _missing, _two_steps, _groups))
    return kind(dice)


def is_right(problem: Problem, answer: str) -> bool:
    """Return whether the last number in the text is the answer."""
    numbers = _NUMBER.findall(answer)
    if not numbers:
        return False
    return float(numbers[-1].replace(",", "")) == problem.answer


def _ask(dice: Dice, sum: str) -> str:
    return dice.pick(
        (
            f"What is {sum}?",
            f"Calculate {sum}.",
            f"How much is {sum}?",
            f"{sum} = ?",
            f"Work out {sum}.",
        )
    )


def _digits(dice: Dice) -> int:
    """A number of one, two or sometimes three digits, with the frequencies of the tuple."""
    return dice.between(1, dice.pick((9, 99, 99, 99, 999)))


def _add(dice: Dice) -> Problem:
    a, b = _digits(dice), _digits(dice)
    return Problem(_ask(dice, f"{a} + {b}"), f"{a} + {b} = {a + b}.", a + b)


def _subtract(dice: Dice) -> Problem:
    a, b = sorted((_digits(dice), _digits(dice)), reverse=True)
    return Problem(_ask(dice, f"{a} - {b}"), f"{a} - {b} = {a - b}.", a - b)


def _multiply(dice: Dice) -> Problem:
    a, b = dice.between(2, 12), dice.between(2, dice.pick((12, 12, 99)))
    return Problem(_ask(dice, f"{a} * {b}"), f"{a} * {b} = {a * b}.", a * b)


def _divide(dice: Dice) -> Problem:
    a, b = dice.between(2, 12), dice.between(2, 20)
    return Problem(_ask(dice, f"{a * b} / {a}"), f"{a} * {b} = {a * b}, so {a * b} / {a} = {b}.", b)


def _missing(dice: Dice) -> Problem:
    a, b = dice.between(1, 50), dice.between(1, 50)
    return Problem(f"Which number added to {a} gives {a + b}?", f"{a + b} - {a} = {b}.", b)


def _two_steps(dice: Dice) -> Problem:
    name, thing = dice.pick(_NAMES), dice.pick(_THINGS)
    has, more = dice.between(5, 60), dice.between(2, 40)
    less = dice.between(1, has + more - 1)
    left = has + more - less
    return Problem(
        f"{name} has {has} {thing}. {name} finds {more} more and gives {less} away. "
        f"How many {thing} are left?",
        f"{has} + {more} = {has + more}. {has + more} - {less} = {left}.",
        left,
    )


def _groups(dice: Dice) -> Problem:
    name, thing = dice.pick(_NAMES), dice.pick(_THINGS)
    boxes, each, extra = dice.between(2, 9), dice.between(2, 12), dice.between(1, 20)
    total = boxes * each + extra
    return Problem(
        f"{name} has {boxes} boxes with {each} {thing} in each, and {extra} more on the table. "
        f"How many {thing} does {name} have in all?",
        f"{boxes} * {each} = {boxes * each}. {boxes * each} + {extra} = {total}.",
        total,
    )
