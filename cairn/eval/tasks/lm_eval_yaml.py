"""A task that is written as lm-eval writes them, in YAML, over documents of local JSON files. Scores nothing itself.

    output_type: multiple_choice          doc_to_text, doc_to_choice, doc_to_target   acc, acc_norm
                 generate_until           doc_to_text, doc_to_target                  exact_match
                 loglikelihood_rolling    doc_to_target: the text                     perplexities

A doc_to_... is the name of a field, or a Jinja template over the fields. What would change the scores and is not
understood (functions, filters, other metrics, data sets of the hub) is refused by its name.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import yaml
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from cairn.core.errors import DataError
from cairn.eval.tasks.exact_match import Equality, ExactMatch, Filter, Question
from cairn.eval.tasks.multiple_choice import AnswerChoice, MultipleChoice
from cairn.eval.tasks.perplexity import Perplexity
from cairn.eval.tasks.task import SEED, EvaluationTask, TaskSettings, examples

READ = {
    "task", "dataset_path", "dataset_name", "dataset_kwargs", "test_split", "validation_split", "training_split",
    "fewshot_split", "output_type", "doc_to_text", "doc_to_choice", "doc_to_target", "description",
    "target_delimiter", "fewshot_delimiter", "num_fewshot", "generation_kwargs", "metric_list",
}  # fmt: skip
HARMLESS = {"tag", "group", "task_alias", "metadata", "should_decontaminate", "doc_to_decontamination_query",
            "repeats", "class"}  # fmt: skip
METRICS = {
    "multiple_choice": {"acc", "acc_norm"},
    "generate_until": {"exact_match"},
    "loglikelihood_rolling": {"word_perplexity", "byte_perplexity", "bits_per_byte"},
}
MAX_TOKENS = 256  # lm-eval's max_gen_toks
HINT = "run it by lm-eval itself, with cairn.eval.lm_eval_adapter.CairnLM as the model"
Fields = Mapping[str, Any]


def lm_eval_task(
    path: Path, settings: TaskSettings, read_lines: Callable[[Path], Sequence[Fields]]
) -> EvaluationTask:
    given = _checked(_document(path), path)
    name, kind = str(given.get("task", path.stem)), given["output_type"]
    documents = [one for file in _files(given, path) for one in read_lines(file)]
    used = documents[: settings.limit]
    if kind == "loglikelihood_rolling":
        texts = [str(_value(given, "doc_to_target", one, path)) for one in used]
        return Perplexity(name, texts, settings.window, settings.stride)
    shots = int(given.get("num_fewshot") or 0) if settings.shots is None else settings.shots
    prompts = _prompts(given, documents, len(used), shots, path)
    if kind == "multiple_choice":
        questions = [
            AnswerChoice(prompt, *_choices(given, one, path))
            for prompt, one in zip(prompts, used, strict=True)
        ]
        return MultipleChoice(name, questions, str(given.get("target_delimiter", " ")))
    return _generation(name, given, prompts, used, settings, path)


def _generation(
    name: str, given: Fields, prompts: Sequence[str], used: Sequence[Fields], settings: TaskSettings, path: Path
) -> ExactMatch:  # fmt: skip
    asked = dict(given.get("generation_kwargs") or {})
    until, most = asked.pop("until", ["\n\n"]), asked.pop("max_gen_toks", MAX_TOKENS)
    if asked.pop("do_sample", False) or asked.pop("temperature", 0):
        raise DataError(
            f"{path}: generation_kwargs samples, and answers are greedy here", hint=HINT
        )
    if asked:
        raise DataError(f"{path}: generation_kwargs has {', '.join(asked)}", hint=HINT)
    rule = next(iter(given.get("metric_list") or [{}]))
    equality = Equality(
        tuple(rule.get("regexes_to_ignore", ())),
        bool(rule.get("ignore_case", False)),
        bool(rule.get("ignore_punctuation", False)),
    )
    questions = [
        Question(prompt, str(_value(given, "doc_to_target", one, path)))
        for prompt, one in zip(prompts, used, strict=True)
    ]
    stops = [until] if isinstance(until, str) else until
    most = settings.max_tokens or most
    return ExactMatch(
        name, questions, {"exact_match": Filter()}, equality, stops, most, settings.chat
    )


def _prompts(
    given: Fields, documents: Sequence[Fields], count: int, shots: int, path: Path
) -> list[str]:
    delimiter, between = given.get("target_delimiter", " "), given.get("fewshot_delimiter", "\n\n")
    random, prompts = Random(SEED), []
    for document in documents[:count]:
        shown = examples(documents, shots, random, document)
        solved = "".join(
            f"{_value(given, 'doc_to_text', one, path)}{delimiter}{_solution(given, one, path)}{between}"
            for one in shown
        )
        asked = _value(given, "doc_to_text", document, path)
        prompts.append(f"{given.get('description', '')}{solved}{asked}")
    return prompts


def _solution(given: Fields, document: Fields, path: Path) -> str:
    if given["output_type"] == "multiple_choice":
        choices, right = _choices(given, document, path)
        return choices[right]
    return str(_value(given, "doc_to_target", document, path))


def _choices(given: Fields, document: Fields, path: Path) -> tuple[list[str], int]:
    written = given["doc_to_choice"]
    if isinstance(written, list):
        found: Any = [_rendered(str(one), document, path) for one in written]
    else:
        found = _value(given, "doc_to_choice", document, path)
        found = _literal(found, path) if isinstance(found, str) else found
    choices = [str(one) for one in (found.values() if isinstance(found, dict) else found)]
    target = _value(given, "doc_to_target", document, path)
    text = str(target).strip()
    if text in choices and not isinstance(target, int):
        return choices, choices.index(text)
    if text.isdigit() and int(text) < len(choices):
        return choices, int(text)
    raise DataError(
        f"{path}: the target {text!r} is none of the choices {', '.join(choices)}",
        hint="doc_to_target is the place of the right one, from 0, or its text",
    )


def _value(given: Fields, key: str, document: Fields, path: Path) -> Any:
    """A field of the document, or the template over its fields."""
    written = given[key]
    if isinstance(written, str) and written in document:
        return document[written]
    return _rendered(written, document, path) if isinstance(written, str) else written


def _rendered(template: str, document: Fields, path: Path) -> str:
    environment = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    try:
        return environment.from_string(template).render(**document)
    except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
        raise DataError(
            f"{path}: the template {template[:60]!r} fails: {error}",
            hint=f"the fields of a document are: {', '.join(document)}",
        ) from None


def _literal(text: str, path: Path) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise DataError(
            f"{path}: doc_to_choice gives {text[:60]!r}, which is no list",
            hint="such as ['yes', 'no']",
        ) from None


def _document(path: Path) -> dict[str, Any]:
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        said = " ".join(str(error).split())
        raise DataError(f"{path} is no task: {said}", hint=HINT) from None
    if not isinstance(given, dict):
        raise DataError(
            f"{path} is no task", hint="it has task, dataset_path, output_type and so on"
        )
    return given


def _checked(given: dict[str, Any], path: Path) -> dict[str, Any]:
    if unknown := [key for key in given if key not in READ | HARMLESS]:
        raise DataError(f"{path} has {', '.join(unknown)}, which is not understood", hint=HINT)
    kind = given.get("output_type", "generate_until")
    if kind not in METRICS:
        raise DataError(f"{path}: output_type is {kind}; there are {', '.join(METRICS)}", hint=HINT)
    needed = ["doc_to_target"] + ["doc_to_text"] * (kind != "loglikelihood_rolling")
    needed += ["doc_to_choice"] * (kind == "multiple_choice")
    if missing := [key for key in needed if key not in given]:
        raise DataError(f"{path} has no {' and no '.join(missing)}", hint="lm-eval needs it, too")
    names = {str(one.get("metric")) for one in given.get("metric_list") or []}
    if other := sorted(names - METRICS[kind]):
        raise DataError(f"{path}: {kind} has no metric {', '.join(other)} here", hint=HINT)
    return {**given, "output_type": kind}


def _files(given: Fields, path: Path) -> list[Path]:
    """The local files of the split that is scored, by names as the task has them: here, or beside the task."""
    found = (given.get("dataset_kwargs") or {}).get("data_files")
    if given.get("dataset_path") != "json" or not found:
        raise DataError(
            f"{path}: dataset_path is {given.get('dataset_path')}, and only local files are read",
            hint="dataset_path: json, with dataset_kwargs: {data_files: {test: FILE.jsonl}}",
        )
    split = given.get("test_split") or given.get("validation_split") or "test"
    if isinstance(found, dict):
        if split not in found:
            raise DataError(f"{path}: data_files has no {split}", hint=f"it has {', '.join(found)}")
        found = found[split]
    files = [Path(one) for one in ([found] if isinstance(found, str) else found)]
    return [one if one.is_file() else path.parent / one for one in files]
