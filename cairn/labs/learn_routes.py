"""The roadmap over HTTP, beside the server's API: the page's Learn view asks here.

    GET /cairn/learn                    the map, with what is done
    GET /cairn/learn/topics/{topic}     one topic, with the newest run of each of its labs
    GET /cairn/learn/labs/{lab}         a lab and its newest run
    POST /cairn/learn/labs/{lab}/run    starts its quick form; GET: the steps so far and the verdict
    GET /cairn/learn/words              the words around them, in both languages
    GET /cairn/learn/exercises          all exercises, and which of them were passed here
    GET /cairn/learn/exercises/{name}   one: what is wanted, its hints, the skeleton
    GET /cairn/learn/interview          the rounds and their questions, without answers
    GET /cairn/learn/grade              ?round=&topic=&number=&answer=  a typed answer beside its rubric

A lab runs for a browser of this machine, or for one that has shown a key; one at a time, in a process of its own.
Exercises run in the terminal; a graded answer is not kept. Each document is read from the record anew. Where the server
has keys, these paths ask for one as well.
"""

from urllib.parse import parse_qs, urlsplit

from msgspec.structs import asdict
from starlette.concurrency import run_in_threadpool

from cairn.core.errors import RequestError
from cairn.core.shared_secret import is_loopback
from cairn.labs.catalogue import all_labs
from cairn.labs.exercises.exercise import all_exercises
from cairn.labs.interview import rounds
from cairn.labs.learn_documents import (
    exercise_document,
    exercises_document,
    graded_document,
    interview_round,
)
from cairn.labs.learner import Learner, lab_document, look, map_document, topic_document
from cairn.labs.live_runs import LiveRuns
from cairn.labs.wording import WORDS
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.server.api import Guarded
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.keys import ANYBODY
from cairn.serve.http.server.service import Service

FORWARDED = {b"forwarded", b"x-forwarded-for", b"x-real-ip"}  # what proxies add
RUNS = LiveRuns()  # of this process, which has one server


def routes() -> list[Guarded]:
    return [
        Guarded("/cairn/learn", learn_map),
        Guarded("/cairn/learn/topics/{topic}", learn_topic),
        Guarded("/cairn/learn/labs/{lab}", learn_lab),
        Guarded("/cairn/learn/labs/{lab}/run", learn_lab_run, ("GET", "POST")),
        Guarded("/cairn/learn/words", learn_words),
        Guarded("/cairn/learn/exercises", learn_exercises),
        Guarded("/cairn/learn/exercises/{name}", learn_exercise),
        Guarded("/cairn/learn/interview", learn_interview),
        Guarded("/cairn/learn/grade", learn_grade),
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


async def learn_lab_run(service: Service, call: Call, body: bytes) -> JSON:
    """Starts it, or says how far it is."""
    name = call.scope["path_params"]["lab"]
    if name not in all_labs():
        raise Refusal(404, f"there is no lab '{name}'")
    if call.scope["method"] == "POST":
        _check_starter(call)
        try:
            RUNS.start(name)
        except RequestError as error:
            raise Refusal(409, f"{error.message}; {error.hint}") from error
    return JSON(RUNS.state(name))


def _check_starter(call: Call) -> None:
    """A page of another site cannot send JSON here unasked, nor a stranger on the network use these cores."""
    kinds = [value for name, value in call.scope["headers"] if name == b"content-type"]
    if not kinds or not kinds[0].startswith(b"application/json"):
        raise Refusal(415, "a lab is started with content-type: application/json")
    headers = dict(call.scope["headers"])
    host = (call.scope.get("client") or ("", 0))[0]
    asked = urlsplit(f"//{headers.get(b'host', b'').decode('latin-1')}").hostname or ""
    # Behind a proxy everybody comes from here, and a name that was bound to 127.0.0.1 is another site's.
    near = is_loopback(host) and is_loopback(asked) and not FORWARDED & headers.keys()
    if call.holder == ANYBODY and not near:
        raise Refusal(
            403,
            f"{host} asked for {asked or 'no host'}: labs run for a browser of this machine, or with a key of "
            "the server; in a terminal: cairn lab run",
        )


async def learn_words(service: Service, call: Call, body: bytes) -> JSON:
    return JSON({name: asdict(words) for name, words in WORDS.items()})


async def learn_exercises(service: Service, call: Call, body: bytes) -> JSON:
    return JSON(await run_in_threadpool(exercises_document))


async def learn_exercise(service: Service, call: Call, body: bytes) -> JSON:
    name = call.scope["path_params"]["name"]
    if name not in all_exercises():
        raise Refusal(404, f"there is no exercise '{name}'")
    return JSON(await run_in_threadpool(exercise_document, all_exercises()[name]))


async def learn_interview(service: Service, call: Call, body: bytes) -> JSON:
    return JSON([interview_round(one) for one in rounds().values()])


async def learn_grade(service: Service, call: Call, body: bytes) -> JSON:
    asked = {
        name: values[-1] for name, values in parse_qs(call.scope["query_string"].decode()).items()
    }
    one = rounds().get(asked.get("round", ""))
    found = [q for q in one.question if q.topic == asked.get("topic")] if one is not None else []
    number = asked.get("number", "0")  # of those of one topic
    if not number.isdecimal() or int(number) >= len(found):
        raise Refusal(
            404, "there is no such question: give round, topic, answer and perhaps number"
        )
    return JSON(graded_document(found[int(number)], asked.get("answer", "")))


async def _learner() -> Learner:
    """Away from the event loop: it reads files and asks the machine."""
    return await run_in_threadpool(look)
