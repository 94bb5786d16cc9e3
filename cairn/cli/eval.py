"""`cairn eval`: scores of a model on tasks and files. Shows them; computes nothing itself."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import tyro

from cairn.core.config import load
from cairn.core.errors import UsageError
from cairn.core.trace import make_place
from cairn.core.units import format_duration
from cairn.models.hub import AUTO, default_model

if TYPE_CHECKING:
    from cairn.eval.run import Evaluation, TaskResult
    from cairn.eval.tasks.task import EvaluationTask

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Eval(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Score a model: perplexity of files, multiple choice, exact match.

    MODEL is a folder, a .gguf file, owner/name on the hub, or the name of a packaged model; without it the small chat
    model. A task is gsm8k, or a file: text, or jsonl with `text` (perplexity), with `question`, `choices` and `answer`
    (multiple choice), or with `question` and `answer` (exact match), or a task of BIG-bench or lm-eval. Each score has
    a 95% interval: Wilson's for shares of right answers, a bootstrap for perplexities.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = AUTO
    """a path or a name, see above"""
    tasks: list[str] = []
    """names or files, also separated by commas"""
    data: Path | None = None
    """the folder with the files of named tasks; by default tasks/ here, or shared/data/tasks beside the checkout"""
    limit: Positive | None = None
    """only the first documents of each task"""
    shots: Count | None = None
    """solved examples in each prompt; by default 5 for gsm8k, 0 for files"""
    chat: bool = False
    """put each prompt into the chat template of the model, as the message of a user"""
    max_tokens: Positive | None = None
    """of a generated answer; by default 256 for gsm8k, 64 for files"""
    max_length: Count = 0
    """tokens that the model sees at once; 0: its context"""
    stride: Count = 0
    """perplexity by sliding windows that begin so many tokens apart; 0: windows that share one token, as lm-eval's"""
    batch_tokens: Count = 0
    """tokens that are scored in one pass; 0: one document at a time on a CPU, 16,384 on a GPU"""
    batch_invariant: bool = False
    """on a CPU, generate the same tokens whatever else is in the batch, bit by bit; slower"""
    device: str = "auto"
    """cpu, cuda, cuda:N; auto takes a GPU where there is one"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """type to compute in; auto: float32 on a CPU, the type of the weights on a GPU"""
    weights: Literal["auto", "float", "int8", "int4"] = "auto"
    """on a CPU, how generation multiplies with weights; auto: float, of which the answers do not depend on the batch"""
    against: Path | None = None
    """scores of another model on the same tasks, as --json wrote them: say which differences are more than chance"""
    html: Path | None = None
    """write the scores and the first answers as a page"""
    config: Path | None = None
    """a TOML file with any of these settings"""
    json: bool = False
    """print the scores and all answers as JSON"""


def run(args: list[str]) -> int:
    options = load(Eval, args=args, env_prefix="CAIRN_EVAL_", file_field="config").value
    names = [name for given in options.tasks for name in given.split(",") if name]
    if not names:
        raise UsageError("no task is named", hint="such as --tasks gsm8k, or --tasks text.txt")
    name = options.model
    if name == AUTO:
        default = default_model()
        name = default.name
        print(default.why, file=sys.stderr)
    make_place(options.html, "--html")
    tasks = _open_tasks(options, names)
    other = None
    if options.against is not None:
        from cairn.eval.paired import check_tasks, read_evaluation

        other = read_evaluation(options.against)
        check_tasks([task.name for task in tasks], other)
    evaluation = _evaluate(options, name, tasks)
    try:
        if other is not None:
            evaluation = _held_against(evaluation, other, options.json)
    finally:  # the scores are there, whether or not the other ones are of the same documents
        _write(evaluation, options, shlex.join(["cairn", "eval", *args]))
    return 0


def _open_tasks(options: Eval, names: list[str]) -> "list[EvaluationTask]":
    from cairn.eval.tasks.find import open_task
    from cairn.eval.tasks.task import TaskSettings

    settings = TaskSettings(
        limit=options.limit,
        shots=options.shots,
        max_tokens=options.max_tokens,
        chat=options.chat,
        window=options.max_length,
        stride=options.stride,
    )
    return [open_task(task, settings, options.data) for task in names]


def _evaluate(options: Eval, name: str, tasks: "list[EvaluationTask]") -> "Evaluation":
    # Imported late: torch takes seconds, which a wrong flag should not have to wait for.
    from cairn.eval.local_model import LocalModel
    from cairn.eval.run import evaluate

    show = (lambda result: None) if options.json else _show
    with LocalModel(
        name,
        device=options.device,
        dtype=options.dtype,
        weights=options.weights,
        batch_tokens=options.batch_tokens,
        batch_invariant=options.batch_invariant,
        max_length=options.max_length,
    ) as model:
        return evaluate(model, tasks, show)


def _held_against(evaluation: "Evaluation", other: "Evaluation", quiet: bool) -> "Evaluation":
    from cairn.cli.columns import lines
    from cairn.eval.paired import differences

    found = differences(evaluation, other)
    if not quiet:
        print(f"against {other.model}, document by document:")
        headings = ["task", "metric", "difference", "95% interval", "better", "worse", "verdict"]
        rows = [
            [
                one.task,
                one.metric,
                f"{one.value:+.4f}",
                f"{one.low:+.4f} to {one.high:+.4f}",
                str(one.better),
                str(one.worse),
                one.verdict(),
            ]
            for one in found
        ]
        print("\n".join(lines(headings, rows, left=[0, 1, 6])))
    return msgspec.structs.replace(evaluation, against=other.model, differences=found)


def _write(evaluation: "Evaluation", options: Eval, command: str) -> None:
    if options.html is not None:
        from cairn.eval.page import write_page

        write_page(evaluation, command, options.html)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(evaluation)).decode())
    elif options.html is not None:
        print(f"page: {options.html}")


def _show(result: "TaskResult") -> None:
    took = format_duration(round(result.seconds, 1))
    documents = "document" if result.documents == 1 else "documents"
    print(f"{result.task}: {result.documents} {documents} in {took}")
    width = max(map(len, result.metrics))
    for name, metric in result.metrics.items():
        line = f"  {name:<{width}}  {metric.shown():>9}  {metric.interval()}"
        print(line.rstrip())
