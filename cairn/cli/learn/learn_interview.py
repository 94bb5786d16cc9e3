"""`cairn learn interview`: asks, reads a typed answer, grades it by the rubric, and asks the follow-up.

Answers come from the terminal, or one per line from a pipe. What was answered goes to the file of answers, from which
`due` says what to ask again. Chooses and prints; `cairn.labs.interview` and `cairn.labs.rubric` decide.
"""

import secrets
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from cairn.cli.learn.learn_show import wrapped
from cairn.labs.lab import Language, Words
from cairn.labs.rubric import worded

if TYPE_CHECKING:
    from cairn.cli.learn.learn import Learn
    from cairn.labs.interview import Drilled, Round
    from cairn.labs.rubric import Graded


def run_interview(options: "Learn") -> int:
    from cairn.labs.interview import choose, due, find_round, rounds
    from cairn.labs.learner import answers

    kept = answers()
    wanted = [find_round(options.round)] if options.round else list(rounds().values())
    waiting = due(kept.read().values, datetime.now(UTC))
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    asked = choose(wanted, options.count, seed, waiting)
    if options.json:
        document = {"seed": seed, "due": waiting, "questions": [_document(*pair) for pair in asked]}
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
        return 0
    scores: dict[str, list[float]] = {}
    for number, (one, question) in enumerate(asked, 1):
        graded = _ask(one, question, number, len(asked), options.lang)
        if graded is None:
            break
        scores.setdefault(one.id, []).append(graded.share)
        kept.add(question.topic, graded.right)
    print("\n".join(_matrix(scores, options.lang)))
    return 0


def _ask(
    one: "Round", question: "Drilled", number: int, total: int, language: Language
) -> "Graded | None":
    """None: the learner has had enough."""
    from cairn.labs.rubric import grade_answer

    head = f"{number}/{total}  {one.title.of(language)} ({question.topic})"
    evidence = [f"  | {line}" for line in question.evidence.strip().splitlines()]
    print("\n".join(["", head, *evidence, *wrapped(question.ask.of(language), "  ")]))
    reply = _read(YOUR_ANSWER.of(language))
    if reply is None or reply.strip().lower() in ("q", "quit"):
        return None
    graded = grade_answer(reply, question.points)
    print("\n".join(_told(graded, question, language)))
    return graded


def _told(graded: "Graded", question: "Drilled", language: Language) -> list[str]:
    found, missing = (
        "; ".join(worded(point, language) for point in points) or "–"
        for points in (graded.found, graded.missing)
    )
    return [
        f"  {graded.share:.0%}  ✓ {found}",
        f"       ✗ {missing}",
        *wrapped(question.answer.of(language), "  > "),
        *wrapped(f"{FOLLOW_UP.of(language)}: {question.follow.of(language)}", "  "),
    ]


def _matrix(scores: dict[str, list[float]], language: Language) -> list[str]:
    from cairn.labs.interview import rounds

    lines = [""]
    for name, one in rounds().items():
        given = scores.get(name)
        mean = f"{sum(given) / len(given):.0%}" if given else "–"
        lines.append(f"{mean:>5}  {name:<11} {one.title.of(language)}: {one.wants.of(language)}")
    return [*lines, NOTE.of(language)]


def _read(prompt: str) -> str | None:
    """One line of the terminal or of a pipe; None at its end."""
    if sys.stdin.isatty():
        try:
            return input(prompt)
        except EOFError:
            return None
    return sys.stdin.readline() or None


def _document(one: "Round", question: "Drilled") -> dict[str, object]:
    return {"round": one.id, **msgspec.to_builtins(question)}


YOUR_ANSWER = Words("your answer (q stops): ", "你的回答（q 退出）：")
FOLLOW_UP = Words("Follow-up", "追问")
NOTE = Words(
    "Graded by key facts and numbers, not by meaning: read the model answer beside yours.",
    "按要点与数字评分，不理解语义：请对照参考答案。",
)
