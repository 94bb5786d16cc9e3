"""`cairn learn interview` and `placement`: ask, read a typed answer, grade it by the rubric, ask the follow-up.

Answers come from the terminal, or one per line from a pipe. What was answered goes to the file of answers, from which
`due` says what to ask again. Chooses and prints; `cairn.labs.interview` and `cairn.labs.rubric` decide.
"""

import secrets
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from cairn.cli.learn.learn_show import grades, wrapped
from cairn.labs.lab import Language, Words
from cairn.labs.wording import WORDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cairn.cli.learn.learn import Learn
    from cairn.labs.interview import Drilled, Round
    from cairn.labs.learner import Learner
    from cairn.labs.roadmap import Topic
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


def run_placement(learner: "Learner", topics: "Sequence[Topic]", options: "Learn") -> int:
    """Two questions of each topic that is not done; both right: it counts as known, and what needs it is unlocked."""
    from cairn.labs.interview import LESSONS, find_round
    from cairn.labs.learner import answers

    asked = find_round(LESSONS)
    by_topic = {one.id: [q for q in asked.question if q.topic == one.id] for one in topics}
    left = [name for name in by_topic if learner.standings[name].state != "done"]
    pairs = [(name, by_topic[name]) for name in left if by_topic[name]][: options.count]
    if options.json:
        document = [_document(asked, question) for _, both in pairs for question in both]
        print(msgspec.json.format(msgspec.json.encode({"questions": document})).decode())
        return 0
    known: list[str] = []
    for number, (name, questions) in enumerate(pairs, 1):
        grades = []
        for question in questions:
            graded = _ask(asked, question, number, len(pairs), options.lang)
            if graded is None:
                print(_placed(known, options.lang))
                return 0
            grades.append(graded.right)
        placed = all(grades)
        answers().add(name, placed, placed)
        known += [name] if placed else []
    print(_placed(known, options.lang))
    return 0


def _placed(known: list[str], language: Language) -> str:
    names = ", ".join(known) or "–"
    return Words(f"known, and done: {names}", f"已掌握，记为完成：{names}").of(language)


def _ask(
    one: "Round", question: "Drilled", number: int, total: int, language: Language
) -> "Graded | None":
    """Ask a question; None if the learner quits."""
    from cairn.labs.rubric import grade_answer

    head = f"{number}/{total}  {one.title.of(language)} ({question.topic})"
    evidence = [f"  | {line}" for line in question.evidence.strip().splitlines()]
    print("\n".join(["", head, *evidence, *wrapped(question.ask.of(language), "  ")]))
    reply = _read(WORDS["type an answer"].of(language))
    if reply is None or reply.strip().lower() in ("q", "quit"):
        return None
    graded = grade_answer(reply, question.points)
    print("\n".join(_told(graded, question, language)))
    return graded


def _told(graded: "Graded", question: "Drilled", language: Language) -> list[str]:
    return [
        *grades(graded, language),
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
    """Read a line from the terminal or a pipe; None at its end."""
    if sys.stdin.isatty():
        try:
            return input(prompt)
        except EOFError:
            return None
    return sys.stdin.readline() or None


def _document(one: "Round", question: "Drilled") -> dict[str, object]:
    return {"round": one.id, **msgspec.to_builtins(question)}


FOLLOW_UP = Words("Follow-up", "追问")
NOTE = Words(
    "Graded by key facts and numbers, not by meaning: read the model answer beside yours.",
    "按要点与数字评分，不理解语义：请对照参考答案。",
)
