"""Sums in every wording, and word problems of one step: questions whose answers are right by construction.

    addition(dice) -> ("What is 47 + 38?", "47 + 38 = 85. The answer is 85.")

Each is a pure function of its dice. Knows no chats; `conversations` and `assemble` use it.
"""

from cairn.train.data.arithmetic import problem
from cairn.train.data.counter_rng import Dice, words

Turn = tuple[str, str]  # what the user asks, what the assistant answers

NAMES = words(
    "Mia Tom Anna Ben Zoe Leo Nora Sam Ruby Finn Lily Max Emma Paul Ida Otto Clara Hugo Sara Tim"
)
THINGS = words(
    "apples shells books coins stones cards stamps pencils marbles cookies balls eggs flowers stickers cups"
)


def two_digits(dice: Dice) -> int:
    return dice.between(10, 99) if dice.below(5) else dice.between(0, 9)


def addition(dice: Dice) -> Turn:
    a, b = two_digits(dice), two_digits(dice)
    if dice.below(12) == 0:
        a, b = dice.between(100, 999), dice.between(10, 999)
    sign = dice.pick((f"{a} + {b}", f"{a} + {b}", f"{a}+{b}", f"{a} plus {b}"))
    asked = dice.pick(
        (f"What is {sign}?", f"What is {sign}?", f"What's {sign}?", f"How much is {sign}?", f"Calculate {sign}.",
         f"{sign}", f"{sign} = ?", f"{sign}=", f"Add {a} and {b}.", f"What is the sum of {a} and {b}?",
         f"Can you add {a} and {b}?", f"Please add {a} and {b}.", f"Work out {sign}.", f"Compute {sign}.")
    )  # fmt: skip
    return asked, f"{a} + {b} = {a + b}. The answer is {a + b}."


def subtraction(dice: Dice) -> Turn:
    a, b = sorted((two_digits(dice), two_digits(dice)), reverse=True)
    sign = dice.pick((f"{a} - {b}", f"{a} - {b}", f"{a}-{b}", f"{a} minus {b}"))
    asked = dice.pick(
        (f"What is {sign}?", f"What is {sign}?", f"What's {sign}?", f"How much is {sign}?", f"Calculate {sign}.",
         f"{sign}", f"{sign} = ?", f"Subtract {b} from {a}.", f"Take {b} away from {a}.", f"Work out {sign}.",
         f"What is the difference between {a} and {b}?", f"Compute {sign}.")
    )  # fmt: skip
    return asked, f"{a} - {b} = {a - b}. The answer is {a - b}."


def times(dice: Dice) -> Turn:
    a, b = dice.between(2, 12), dice.between(2, 12)
    sign = dice.pick((f"{a} * {b}", f"{a} x {b}", f"{a} times {b}"))
    asked = dice.pick((f"What is {sign}?", f"How much is {sign}?", f"Calculate {sign}.", f"{sign}"))
    return asked, f"{a} * {b} = {a * b}. The answer is {a * b}."


def any_problem(dice: Dice) -> Turn:
    made = problem(dice.below(1 << 62), 0)
    return made.question, made.solution


def bought_or_given(dice: Dice) -> Turn:
    name, other, thing = dice.pick(NAMES), dice.pick(NAMES), dice.pick(THINGS)
    a, b = dice.between(2, 60), dice.between(2, 40)
    form = dice.below(5)
    if form == 0:
        asked = f"{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have now?"
        return asked, f"{a} + {b} = {a + b}. {name} has {a + b} {thing} now."
    if form == 1:
        a = a + b
        asked = (
            f"{name} has {a} {thing} and gives {b} of them to {other}. How many {thing} are left?"
        )
        return asked, f"{a} - {b} = {a - b}. {name} has {a - b} {thing} left."
    if form == 2:
        each, boxes = dice.between(2, 12), dice.between(2, 9)
        asked = (
            f"There are {boxes} boxes with {each} {thing} in each box. How many {thing} are there?"
        )
        return asked, f"{boxes} * {each} = {boxes * each}. There are {boxes * each} {thing}."
    if form == 3:
        asked = (
            f"{name} has {a} {thing} and {other} has {b} {thing}. How many do they have together?"
        )
        return asked, f"{a} + {b} = {a + b}. Together they have {a + b} {thing}."
    each, children = dice.between(2, 12), dice.between(2, 9)
    asked = f"{name} shares {each * children} {thing} among {children} children. How many does each child get?"
    return asked, f"{each * children} / {children} = {each}. Each child gets {each} {thing}."


def larger(dice: Dice) -> Turn:
    a = dice.between(1, 99)
    b = a + dice.between(1, 50)
    one, other = (a, b) if dice.below(2) else (b, a)
    if dice.below(2):
        return f"Which is larger, {one} or {other}?", f"{b} is larger than {a}."
    return f"Which number is smaller, {one} or {other}?", f"{a} is smaller than {b}."


def count(dice: Dice) -> Turn:
    first = dice.pick((1, 1, 1, dice.between(1, 50)))
    last = first + dice.between(2, 9)
    return f"Count from {first} to {last}.", ", ".join(map(str, range(first, last + 1))) + "."


def next_number(dice: Dice) -> Turn:
    a = dice.between(1, 98)
    if dice.below(2):
        return f"Which number comes after {a}?", f"{a + 1} comes after {a}."
    return f"Which number comes before {a}?", f"{a - 1} comes before {a}."
