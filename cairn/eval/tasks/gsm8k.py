"""Grade-school mathematics (GSM8K, arXiv:2110.14168): the prompt, the stop strings and the filters of lm-eval's task.

Question: ...
Answer: ... #### 72          the examples, from the training file

Question: ...
Answer:                      the model goes on
"""

from collections.abc import Mapping, Sequence
from random import Random

from cairn.eval.tasks.exact_match import Equality, ExactMatch, Filter, Question
from cairn.eval.tasks.task import SEED, TaskSettings, examples

NAME, SHOTS, MAX_TOKENS = "gsm8k", 5, 256
TEST, TRAIN = "gsm8k_test.jsonl", "gsm8k_train.jsonl"
UNTIL = ("Question:", "</s>", "<|im_end|>")
FILTERS = {
    "exact_match,strict-match": Filter(r"#### (\-?[0-9\.\,]+)"),
    "exact_match,flexible-extract": Filter(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", select=-1),
}
EQUALITY = Equality(ignored=(",", r"\$", r"(?s).*#### ", r"\.$"), ignore_case=True)

Problem = Mapping[str, str]  # question, answer


def gsm8k(
    problems: Sequence[Problem], solved: Sequence[Problem], settings: TaskSettings
) -> ExactMatch:
    """`solved`: the training file, of which the examples in the prompt are drawn."""
    shots = SHOTS if settings.shots is None else settings.shots
    random = Random(SEED)
    questions = [
        Question(prompt(problem, examples(solved, shots, random)), problem["answer"])
        for problem in problems[: settings.limit]
    ]
    return ExactMatch(
        NAME, questions, FILTERS, EQUALITY, UNTIL, settings.max_tokens or MAX_TOKENS, settings.chat
    )


def prompt(problem: Problem, shown: Sequence[Problem]) -> str:
    solved = "".join(f"{_ask(one)} {one['answer']}\n\n" for one in shown)
    return solved + _ask(problem)


def _ask(problem: Problem) -> str:
    return f"Question: {problem['question']}\nAnswer:"
