"""The roadmap over HTTP, beside the server's API: the page's Learn view asks here.

    GET /cairn/learn                    the map, with what is done
    GET /cairn/learn/topics/{topic}     one topic, with the newest run of each of its labs
    GET /cairn/learn/labs/{lab}         a lab and its newest run
    GET /cairn/learn/words              the words around them, in both languages
    GET /cairn/learn/exercises          all exercises, and which of them were passed here
    GET /cairn/learn/exercises/{name}   one: what is wanted, its hints, the skeleton
    GET /cairn/learn/quiz               ?course=&topic=&count=&seed=  questions; due ones and unanswered ones first
    GET /cairn/learn/code               ?place=cairn/x.py:name  a source file of this package, and the line
    GET /cairn/learn/interview          the rounds and their questions, without answers
    GET /cairn/learn/grade              ?round=&topic=&number=&answer=  a typed answer beside its rubric

These only read; what a learner sends is in `learn_posts`. Each document is read from the record anew. Where the server
has keys, these paths ask for one as well.
"""

import secrets
from datetime import UTC, datetime
from urllib.parse import parse_qs

from msgspec.structs import asdict
from starlette.concurrency import run_in_threadpool

from cairn.labs import learn_posts
from cairn.labs.catalogue import all_labs
from cairn.labs.exercises.exercise import all_exercises
from cairn.labs.interview import due, rounds
from cairn.labs.learn_documents import (
    code_document,
    exercise_document,
    exercises_document,
    graded_document,
    interview_round,
    quiz_document,
)
from cairn.labs.learner import Learner, answers, lab_document, look, map_document, topic_document
from cairn.labs.quiz import choose_typed
from cairn.labs.roadmap import load
from cairn.labs.wording import WORDS
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.server.api import Guarded
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.service import Service

MOST_QUESTIONS = 50


def routes() -> list[Guarded]:
    return [
        Guarded("/cairn/learn", learn_map),
        Guarded("/cairn/learn/topics/{topic}", learn_topic),
        Guarded("/cairn/learn/labs/{lab}", learn_lab),
        Guarded("/cairn/learn/words", learn_words),
        Guarded("/cairn/learn/exercises", learn_exercises),
        Guarded("/cairn/learn/exercises/{name}", learn_exercise),
        Guarded("/cairn/learn/quiz", learn_quiz),
        Guarded("/cairn/learn/code", learn_code),
        Guarded("/cairn/learn/interview", learn_interview),
        Guarded("/cairn/learn/grade", learn_grade),
        *learn_posts.routes(),
    ]


async def learn_map(service: Service, call: Call, body: bytes) -> JSON:
    return JSON(map_document(await _learner()))


async def learn_topic(service: Service, call: Call, body: bytes) -> JSON:
    learner, name = await _learner(), call.scope["path_params"]["topic"]
    if name not in learner.roadmap.topics:
        raise Refusal(404, f"there is no topic '{name}'")
    return JSON(topic_document(learner, learner.roadmap.topics[name]))


async def learn_lab(service: Service, call: Call, body: bytes) -> JSON:
    learner, name = await _learner(), call.scope["path_params"]["lab"]
    if name not in all_labs():
        raise Refusal(404, f"there is no lab '{name}'")
    return JSON(lab_document(learner, name))


async def learn_words(service: Service, call: Call, body: bytes) -> JSON:
    return JSON({name: asdict(words) for name, words in WORDS.items()})


async def learn_exercises(service: Service, call: Call, body: bytes) -> JSON:
    return JSON(await run_in_threadpool(exercises_document))


async def learn_exercise(service: Service, call: Call, body: bytes) -> JSON:
    name = call.scope["path_params"]["name"]
    if name not in all_exercises():
        raise Refusal(404, f"there is no exercise '{name}'")
    return JSON(await run_in_threadpool(exercise_document, all_exercises()[name]))


async def learn_quiz(service: Service, call: Call, body: bytes) -> JSON:
    query = _query(call)
    topics = list(load().topics.values())
    if "topic" in query:
        topics = [one for one in topics if one.id == query["topic"]]
    if "course" in query:
        sections = {one.id for one in load().map.section if one.course == query["course"]}
        topics = [one for one in topics if one.section in sections]
    numbers = {name: query[name] for name in ("count", "seed") if name in query}
    if not topics or not all(value.isdecimal() for value in numbers.values()):
        raise Refusal(404, "there are no such questions: give topic or course, count and seed")
    seed = int(numbers.get("seed", secrets.randbelow(1 << 31)))
    count = min(int(numbers.get("count", 5)), MOST_QUESTIONS)
    history = (await run_in_threadpool(answers().read)).values
    waiting = due(history, datetime.now(UTC))
    chosen = choose_typed(topics, waiting, {one.topic for one in history}, count, seed)
    return JSON({"seed": seed, "questions": quiz_document(chosen)})


async def learn_code(service: Service, call: Call, body: bytes) -> JSON:
    try:
        return JSON(await run_in_threadpool(code_document, _query(call).get("place", "")))
    except ValueError as error:
        raise Refusal(404, str(error)) from error


async def learn_interview(service: Service, call: Call, body: bytes) -> JSON:
    return JSON([interview_round(one) for one in rounds().values()])


async def learn_grade(service: Service, call: Call, body: bytes) -> JSON:
    query = _query(call)
    one = rounds().get(query.get("round", ""))
    questions = (
        [q for q in one.question if q.topic == query.get("topic")] if one is not None else []
    )
    number = query.get("number", "0")  # of those of one topic
    if not number.isdecimal() or int(number) >= len(questions):
        raise Refusal(
            404, "there is no such question: give round, topic, answer and perhaps number"
        )
    return JSON(graded_document(questions[int(number)], query.get("answer", "")))


def _query(call: Call) -> dict[str, str]:
    parameters = parse_qs(call.scope["query_string"].decode())
    return {name: values[-1] for name, values in parameters.items()}


async def _learner() -> Learner:
    """Away from the event loop: it reads files and asks the machine."""
    return await run_in_threadpool(_look)


def _look() -> Learner:
    all_exercises()  # with the map, so that the first topic does not wait for them
    return look()
