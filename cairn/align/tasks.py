"""Tasks whose answers a program can check. Problem `number` is a pure function of its number.

    sorting      "sort 5391"                       ->  "1359"
    arithmetic   "What is 47 + 38?"                ->  the last number of the answer counts
    largest      "Which number is the largest: 8 or 82? Answer with the number only."        the last number counts
    countdown    "make 17 from 3 4 5 :"            ->  "(3 * 4) + 5": every number once
    format       "What is 47 + 38? Write ..."      ->  half for <answer> </answer>, half for the number in them
    calculator   "compute 7 * 8 + 5"               ->  "<calc>7 * 8 + 5</calc>", reads "<result>61</result>", "61"
    python       the same with "<python>print(7 * 8 + 5)</python>"

Knows no model and no tokens.
"""

import ast
import re
import zlib
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from cairn.align.config import Task
from cairn.train.data import arithmetic
from cairn.train.data.counter_rng import Dice

HELD_OUT = 8  # one of so many prompts is never trained on, whatever its number
LONGEST = 200  # characters of an expression that is worked out
NUMBER_HINT = "Answer with the number only."
FORMAT_HINT = "Write the answer between <answer> and </answer>."


RESULT = "<result>{}</result>"  # what a tool says


class Problem(NamedTuple):
    prompt: str
    solution: str  # a right answer, as a teacher would write it
    key: str  # what the reward compares with
    mistake: str  # a wrong answer, as a careless teacher would write it


Make = Callable[[Task, Dice], Problem]
Reward = Callable[[Problem, str], float]


def make_problem(task: Task, seed: int, number: int, held_out: bool = False) -> Problem:
    """Problem `number` of those that are trained on, or of those that are not: they have no prompt in common."""
    make, attempt = _KINDS[task.kind][0], 0
    while True:
        problem = make(task, Dice(seed, number, 7 + attempt))
        if (zlib.crc32(problem.prompt.encode()) % HELD_OUT == 0) == held_out:
            return problem
        attempt += 1


def reward_of(task: Task, problem: Problem, answer: str) -> float:
    """Between 0 and 1."""
    return _KINDS[task.kind][1](problem, answer)


def _sorting(task: Task, dice: Dice) -> Problem:
    digits = [str(dice.below(10)) for _ in range(task.numbers)]
    ordered = "".join(sorted(digits))
    return Problem(f"sort {''.join(digits)}", ordered, ordered, ordered[::-1])


def _sorted_right(problem: Problem, answer: str) -> float:
    return float(answer.strip() == problem.key)


def _arithmetic(task: Task, dice: Dice) -> Problem:
    word_problem = arithmetic.problem(dice.below(1 << 62), 0)
    careless = word_problem.solution.replace(
        str(word_problem.answer), str(word_problem.answer + 10)
    )
    return Problem(word_problem.question, word_problem.solution, str(word_problem.answer), careless)


def _largest(task: Task, dice: Dice) -> Problem:
    """Different numbers of one or two digits."""
    *others, last = dice.pick_some(range(1, 100), task.numbers)
    largest = str(max(*others, last))
    choice = f"{', '.join(map(str, others))} or {last}"
    wrong = str(min(*others, last))
    return Problem(f"Which number is the largest: {choice}? {NUMBER_HINT}", largest, largest, wrong)


def _last_number_right(problem: Problem, answer: str) -> float:
    return float(arithmetic.is_right(arithmetic.Problem("", "", int(problem.key)), answer))


def _format(task: Task, dice: Dice) -> Problem:
    word_problem = arithmetic.problem(dice.below(1 << 62), 0)
    right = f"<answer>{word_problem.answer}</answer>"
    return Problem(
        f"{word_problem.question} {FORMAT_HINT}",
        right,
        str(word_problem.answer),
        str(word_problem.answer),
    )


def _formatted_right(problem: Problem, answer: str) -> float:
    match = re.fullmatch(r"(?s)(?:(?!<answer>).)*<answer>\s*([^<>]*?)\s*</answer>\s*", answer)
    if match is None:
        return 0.0
    return 0.5 + 0.5 * (match.group(1) == problem.key)


def _countdown(task: Task, dice: Dice) -> Problem:
    """The target is reached by construction: the numbers joined one after the other."""
    numbers = [dice.between(1, 9) for _ in range(task.numbers)]
    text, total = str(numbers[0]), numbers[0]
    for value in numbers[1:]:
        sign = dice.pick(("+", "-", "*"))
        total = total + value if sign == "+" else total - value if sign == "-" else total * value
        text = f"({text}) {sign} {value}" if " " in text else f"{text} {sign} {value}"
    numbers_text = " ".join(str(value) for value in sorted(numbers))
    guess = f" {' + '.join(map(str, numbers))}"
    return Problem(
        f"make {total} from {numbers_text} :", f" {text}", f"{total} {numbers_text}", guess
    )


def _countdown_right(problem: Problem, answer: str) -> float:
    target, *numbers = (int(word) for word in problem.key.split())
    text = answer.strip()
    if len(text) > LONGEST:  # nor would Python read a number of some thousand digits
        return 0.0
    used = sorted(int(word) for word in re.findall(r"\d+", text)[: 2 * len(numbers)])
    if used != sorted(numbers):
        return 0.0
    return float(worked_out(text) == target)


def _with_tool(call: str) -> Make:
    """A sum that a tool works out; a careless teacher adds where it says multiply."""

    def make(task: Task, dice: Dice) -> Problem:
        a, b, c = (dice.between(2, 9) for _ in range(3))
        right, careless = f"{a} * {b} + {c}", f"{a} + {b} + {c}"
        key, wrong = str(a * b + c), str(a + b + c)
        solution = call.format(right) + RESULT.format(key) + key
        mistake = call.format(careless) + RESULT.format(wrong) + wrong
        return Problem(f"compute {right}", solution, key, mistake)

    return make


def _last_turn_right(problem: Problem, answer: str) -> float:
    return float(answer.rpartition("</result>")[2].strip() == problem.key)


def turns_of(answer: str) -> list[tuple[str, bool]]:
    """An answer in parts: what the model writes (True), and what a tool says (False)."""
    parts = re.split(r"(?s)(<result>.*?</result>)", answer)
    return [(part, not at % 2) for at, part in enumerate(parts) if part]


def worked_out(text: str) -> Fraction | None:
    """The value of an expression of whole numbers, + - * / and parentheses; None for anything else."""
    if len(text) > LONGEST:
        return None
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(value)) if not isinstance(node.value, bool):
            return Fraction(value)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _value(left), _value(right)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Div():
                    return a / b
    raise ValueError("this is no sum")


_KINDS: dict[str, tuple[Make, Reward]] = {
    "sorting": (_sorting, _sorted_right),
    "arithmetic": (_arithmetic, _last_number_right),
    "largest": (_largest, _last_number_right),
    "countdown": (_countdown, _countdown_right),
    "format": (_format, _formatted_right),
    "calculator": (_with_tool("<calc>{}</calc>"), _last_turn_right),
    "python": (_with_tool("<python>print({})</python>"), _last_turn_right),
}
