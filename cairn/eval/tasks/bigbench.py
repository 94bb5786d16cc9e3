"""A task of BIG-bench: one JSON document with `examples`, each an input and its targets. Reads; scores nothing.

target_scores  {"yes": 1, "no": 0}    multiple choice; the target with the largest score is right
target         "4" or ["4", "four"]   exact match with the first
"""

from collections.abc import Sequence
from typing import Any

from cairn.core.errors import DataError
from cairn.eval.tasks.exact_match import Equality, ExactMatch, Filter, Question
from cairn.eval.tasks.multiple_choice import AnswerChoice, MultipleChoice
from cairn.eval.tasks.task import EvaluationTask, TaskSettings

INPUT, OUTPUT = "\nQ: ", "\nA:"  # BIG-bench's prefixes, where a task names none
MAX_TOKENS = 64


def is_bigbench(document: object) -> bool:
    return isinstance(document, dict) and isinstance(document.get("examples"), list)


def bigbench(name: str, document: dict[str, Any], settings: TaskSettings) -> EvaluationTask:
    if settings.shots:
        raise DataError(f"{name}: examples in a prompt are not drawn", hint="use --shots 0")
    used = [_checked(one, f"{name} example {at}") for at, one in enumerate(document["examples"])]
    if not used:
        raise DataError(f"{name} has no examples", hint="is it complete?")
    used, prompts = used[: settings.limit], []
    for one in used:
        before = f"{document.get('task_prefix', '')}{document.get('example_input_prefix', INPUT)}"
        after = document.get("example_output_prefix", OUTPUT).rstrip()
        prompts.append(f"{before}{one['input']}{after}".lstrip("\n"))
    if "target_scores" in used[0]:
        return MultipleChoice(name, _choices(prompts, used, name))
    questions = [Question(prompt, _first(one)) for prompt, one in zip(prompts, used, strict=True)]
    return ExactMatch(
        name,
        questions,
        {"exact_match": Filter()},
        Equality(ignore_case=True, ignore_punctuation=True),
        ("\n", "Q:"),
        settings.max_tokens or MAX_TOKENS,
        settings.chat,
    )


def _checked(example: object, where: str) -> dict[str, Any]:
    targets = ("target_scores", "target")
    if not isinstance(example, dict) or not isinstance(example.get("input"), str):
        raise DataError(f"{where} has no input", hint='such as {"input": "...", "target": "..."}')
    if not any(example.get(name) for name in targets):
        raise DataError(f"{where} has neither target_scores nor target", hint="leave it out")
    return example


def _choices(
    prompts: Sequence[str], used: Sequence[dict[str, Any]], name: str
) -> list[AnswerChoice]:
    found = []
    for at, (prompt, one) in enumerate(zip(prompts, used, strict=True)):
        scores = one.get("target_scores")
        if not isinstance(scores, dict) or not all(
            isinstance(s, int | float) for s in scores.values()
        ):
            raise DataError(
                f"{name} example {at} has no target_scores", hint="give one for each answer"
            )
        right = max(range(len(scores)), key=list(scores.values()).__getitem__)
        found.append(AnswerChoice(prompt, list(scores), right))
    return found


def _first(example: dict[str, Any]) -> str:
    target = example["target"]
    return str(target[0] if isinstance(target, list) else target)
