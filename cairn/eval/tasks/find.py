"""Task lookup by name: a built-in task, or a file whose fields determine the task.

    gsm8k                                     gsm8k_test.jsonl and gsm8k_train.jsonl in the folder of tasks
    text.txt, or jsonl with `text`            perplexity
    jsonl with `choices` and `answer`         multiple choice; the answer is a number from 0, a letter, or the text
    jsonl with `question` and `answer`        exact match
    json with `examples`                      a task of BIG-bench
    yaml                                      a task as lm-eval writes them, over local files

A file may be packed (.gz). Tasks whose answers are programs (MBPP, HumanEval) are refused: nothing here runs programs.
The folder of tasks is --data, else `tasks` here, else `shared/data/tasks` beside the checkout.
"""

import gzip
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from cairn.core.errors import DataError, UsageError, did_you_mean
from cairn.eval.tasks import gsm8k
from cairn.eval.tasks.bigbench import bigbench, is_bigbench
from cairn.eval.tasks.exact_match import Equality, ExactMatch, Filter, Question
from cairn.eval.tasks.lm_eval_yaml import lm_eval_task
from cairn.eval.tasks.multiple_choice import AnswerChoice, MultipleChoice
from cairn.eval.tasks.perplexity import Perplexity
from cairn.eval.tasks.task import SEED, EvaluationTask, TaskSettings, examples, text_of

BUILT_IN = (gsm8k.NAME,)
TEXT = (".txt", ".md", ".rst")
QUESTION, ANSWER = ("question", "query", "prompt"), ("answer", "gold", "label", "target")
PROGRAMS = ("test_list", "canonical_solution")  # of MBPP, and of HumanEval
MAX_TOKENS = 64

Fields = dict[str, Any]


def open_task(name: str, settings: TaskSettings, data: Path | None = None) -> EvaluationTask:
    if name in BUILT_IN:
        folder = task_folder(data, gsm8k.TEST)
        shots = gsm8k.SHOTS if settings.shots is None else settings.shots
        solved = read_lines(folder / gsm8k.TRAIN) if shots else []
        return gsm8k.gsm8k(read_lines(folder / gsm8k.TEST), solved, settings)
    path = Path(name)
    if not path.is_file():
        hint = did_you_mean(
            name, BUILT_IN, otherwise=f"built in are {', '.join(BUILT_IN)}; else a file"
        )
        raise UsageError(f"there is no task {name!r}, and no file of that name", hint=hint)
    kind = (path.with_suffix("") if path.suffix == ".gz" else path).suffix
    if kind in TEXT:
        return Perplexity(path.name, [_read(path)], settings.window, settings.stride)
    if kind in (".yaml", ".yml"):
        return lm_eval_task(path, settings, read_lines)
    if (document := _bigbench_document(path)) is not None:
        name = path.parent.name if path.name == "task.json" else path.name
        return bigbench(name, document, settings)
    return from_lines(path.name, read_lines(path), settings)


def _bigbench_document(path: Path) -> Fields | None:
    """The one document of the file, if it is a task of BIG-bench."""
    with suppress(msgspec.DecodeError):
        document = msgspec.json.decode(_read(path))
        return document if is_bigbench(document) else None
    return None


def from_lines(name: str, lines: Sequence[Fields], settings: TaskSettings) -> EvaluationTask:
    """Create the task that the fields of the first line indicate."""
    first, used = lines[0], lines[: settings.limit]
    if any(key in first for key in PROGRAMS):
        raise DataError(
            f"{name} has the fields {', '.join(first)}: its answers are programs, which are not run here",
            hint="`lm_eval` runs them against a server (`cairn serve`); for the perplexity of its texts "
            "keep the field text alone",
        )
    if first.get("choices") is not None:
        return _multiple_choice(name, lines, used, settings)
    if any(key in first for key in QUESTION):
        return _exact_match(name, lines, used, settings)
    if "text" in first:
        texts = [text_of(line, ["text"], f"{name} line {at}") for at, line in enumerate(used, 1)]
        return Perplexity(name, texts, settings.window, settings.stride)
    raise DataError(
        f"{name} has the fields {', '.join(first)}, which are no task",
        hint="lines with text, with question and choices and answer, or with question and answer",
    )


def task_folder(given: Path | None, file: str) -> Path:
    beside = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "tasks"
    folders = [given] if given is not None else [Path("tasks"), beside]
    for folder in folders:
        if (folder / file).is_file():
            return folder
    raise DataError(
        f"there is no {file} in {' or '.join(map(str, folders))}",
        hint="name the folder that holds it with --data",
    )


def read_lines(path: Path) -> list[Fields]:
    """The objects of a jsonl file."""
    lines = []
    for number, line in enumerate(_read(path).split("\n"), start=1):  # texts hold other line ends
        if not line.strip():
            continue
        try:
            lines.append(msgspec.json.decode(line, type=Fields))
        except msgspec.DecodeError as error:
            raise DataError(
                f"{path} line {number}: {error}", hint="one JSON object per line"
            ) from None
    if not lines:
        raise DataError(f"{path} is empty", hint="one JSON object per line")
    return lines


def _read(path: Path) -> str:
    try:
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8-sig") as file:
            return file.read()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read: {error}",
            hint="give a file of UTF-8 text, or such a file as .gz",
        ) from None


def _multiple_choice(
    name: str, pool: Sequence[Fields], used: Sequence[Fields], settings: TaskSettings
) -> MultipleChoice:
    read = [_choice(line, f"{name} line {at}") for at, line in enumerate(pool, 1)]
    random, questions = Random(SEED), []
    for choice in read[: len(used)]:
        shown = examples(read, settings.shots or 0, random, choice)
        solved = "".join(f"{one.prompt} {one.choices[one.right]}\n\n" for one in shown)
        questions.append(choice._replace(prompt=solved + choice.prompt))
    return MultipleChoice(name, questions)


def _choice(line: Fields, where: str) -> AnswerChoice:
    given = line.get("choices")
    if not isinstance(given, list) or len(given) < 2:
        raise DataError(f"{where}: choices is {given!r}", hint="give a list of two texts or more")
    choices = [str(choice) for choice in given]
    answer = text_of(line, ANSWER, where)
    letters = [chr(ord("A") + at) for at in range(len(choices))]
    is_text = any(isinstance(line.get(name), str) for name in ANSWER)
    if is_text and answer in choices:  # "2" among numbers is a choice, not the place of one
        right = choices.index(answer)
    elif answer.isdecimal() and int(answer) < len(choices):
        right = int(answer)
    elif answer in choices:
        right = choices.index(answer)
    elif answer.upper() in letters:
        right = letters.index(answer.upper())
    else:
        raise DataError(
            f"{where}: the answer {answer!r} is none of {len(choices)} choices",
            hint="give its number from 0, its letter, or its text",
        )
    if not all(choices):
        raise DataError(f"{where} has an empty choice", hint="remove it")
    return AnswerChoice(f"Question: {text_of(line, QUESTION, where)}\nAnswer:", choices, right)


def _exact_match(
    name: str, pool: Sequence[Fields], used: Sequence[Fields], settings: TaskSettings
) -> ExactMatch:
    read = [
        Question(
            f"Question: {text_of(line, QUESTION, where)}\nAnswer:", text_of(line, ANSWER, where)
        )
        for line, where in ((line, f"{name} line {at}") for at, line in enumerate(pool, 1))
    ]
    random, questions = Random(SEED), []
    for question in read[: len(used)]:
        shown = examples(read, settings.shots or 0, random, question)
        solved = "".join(f"{one.prompt} {one.expected}\n\n" for one in shown)
        questions.append(question._replace(prompt=solved + question.prompt))
    equality = Equality(ignore_case=True, ignore_punctuation=True)
    return ExactMatch(
        name,
        questions,
        {"exact_match": Filter()},
        equality,
        ("\n", "Question:"),
        settings.max_tokens or MAX_TOKENS,
        settings.chat,
    )
