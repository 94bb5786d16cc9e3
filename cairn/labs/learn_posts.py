"""What a learner sends from the page: a lab to run, the code of an exercise, an answer of the quiz.

    POST /cairn/learn/labs/{lab}/run            {"guess"}  starts its quick form; GET: the steps so far and the verdict
    POST /cairn/learn/exercises/{name}/check    {"code": ...}  grades it in a process of its own, case by case
    POST /cairn/learn/quiz/answer               {"topic", "number", "answer"}  grades an answer by its rubric and keeps
                                                the result; without a rubric {"right"} is the learner's own judgement

Labs run one at a time, and so do exercises. Code runs only where the server was started with `--exercises`, for a
browser of this machine, from a page of this server: a proxy on this machine would look like such a browser.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool

from cairn.core.errors import RequestError
from cairn.hw.probe import probe
from cairn.labs import learner
from cairn.labs.catalogue import all_labs
from cairn.labs.exercises import journal
from cairn.labs.exercises.check import check
from cairn.labs.exercises.exercise import Exercise, all_exercises
from cairn.labs.learn_documents import quiz_answer
from cairn.labs.live_runs import LiveRuns
from cairn.labs.needs import unmet
from cairn.labs.quiz import find_question
from cairn.labs.rubric import grade_answer
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.server.api import Guarded
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.keys import ANYBODY
from cairn.serve.http.server.local_access import check_json, check_near, check_own_page
from cairn.serve.http.server.service import Service

Kind = TypeVar("Kind")

RUNS = LiveRuns()  # of this process, which has one server
GRADING = asyncio.Semaphore(1)
MOST_CODE = 200_000  # characters of an answer
LABS_NEAR = "labs run for a browser of this machine, or with a key of the server; in a terminal: cairn lab run"
CODE_NEAR = "code runs only for a browser of this machine; in a terminal: cairn exercise check NAME"
CODE_OFF = "this server does not run code: start it with --exercises; in a terminal: cairn exercise check NAME"
ANSWERS_NEAR = (
    "answers are kept only for a browser of this machine; in a terminal: cairn learn quiz"
)


class Start(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    guess: float | None = None  # what the learner expects of what the lab asks for


class Code(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    code: str


class Answered(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    topic: str
    number: int = 0
    answer: str = ""
    right: bool | None = None  # the learner's own judgement, where there is no rubric


def routes() -> list[Guarded]:
    return [
        Guarded("/cairn/learn/labs/{lab}/run", learn_lab_run, ("GET",)),
        Guarded("/cairn/learn/labs/{lab}/run", learn_lab_start, ("POST",)),
        Guarded("/cairn/learn/exercises/{name}/check", learn_check, ("POST",)),
        Guarded("/cairn/learn/quiz/answer", learn_quiz_answer, ("POST",)),
    ]


async def learn_lab_run(service: Service, call: Call, body: bytes) -> JSON:
    """How far it is."""
    return JSON(RUNS.state(_lab(call)))


async def learn_lab_start(service: Service, call: Call, body: bytes) -> JSON:
    name = _lab(call)
    check_json(call, "a lab is started")
    check_own_page(call, "a lab is started from a page of this server")
    if call.holder == ANYBODY:
        check_near(call, LABS_NEAR)
    try:
        RUNS.start(name, _read(body, Start).guess)
    except RequestError as error:
        raise Refusal(409, f"{error.message}; {error.hint}") from error
    return JSON(RUNS.state(name))


def _lab(call: Call) -> str:
    name = call.scope["path_params"]["lab"]
    if name not in all_labs():
        raise Refusal(404, f"there is no lab '{name}'")
    return name


async def learn_check(service: Service, call: Call, body: bytes) -> JSON:
    """Grades the code of the learner at this machine."""
    name = call.scope["path_params"]["name"]
    if name not in all_exercises():
        raise Refusal(404, f"there is no exercise '{name}'")
    if not service.config.exercises:
        raise Refusal(403, CODE_OFF)
    _check_writer(call, "an exercise is checked", CODE_NEAR)
    code, exercise = _read(body, Code).code, all_exercises()[name]
    if len(code) > MOST_CODE:
        raise Refusal(413, f"{len(code):,} characters; an answer has at most {MOST_CODE:,}")
    if reasons := await run_in_threadpool(_lacking, exercise):
        raise Refusal(409, "; ".join(reasons))
    if GRADING.locked():
        raise Refusal(409, "an answer is being graded; wait for it")
    async with GRADING:
        return JSON(await run_in_threadpool(_graded, exercise, code))


async def learn_quiz_answer(service: Service, call: Call, body: bytes) -> JSON:
    """An answer beside its rubric or the model answer; what was right or wrong is kept as in a terminal."""
    _check_writer(call, "an answer is sent", ANSWERS_NEAR)
    answer = _read(body, Answered)
    question = find_question(answer.topic, answer.number)
    if question is None:
        raise Refusal(404, f"there is no question {answer.number} of topic '{answer.topic}'")
    graded = grade_answer(answer.answer, question.points) if question.points else None
    right = answer.right if graded is None else graded.right
    if right is not None:
        await run_in_threadpool(learner.answers().add, answer.topic, right)
    return JSON(quiz_answer(question, graded))


def _check_writer(call: Call, what: str, near: str) -> None:
    check_json(call, what)
    check_own_page(call, f"{what} from a page of this server")
    check_near(call, near)


def _read(body: bytes, kind: type[Kind]) -> Kind:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise Refusal(400, str(error)) from error


def _lacking(exercise: Exercise) -> list[str]:
    return [reason.en for reason in unmet(exercise.about.needs, probe())]


def _graded(exercise: Exercise, code: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="cairn-exercise-") as folder:
        file = Path(folder) / exercise.file_name
        file.write_text(code, encoding="utf-8")
        graded = check(exercise, file)
    journal.add(exercise.name, "passed" if graded.passed else "failed")
    return {**msgspec.to_builtins(graded), "passed": graded.passed}
