"""The roadmap over HTTP, beside the server's API: the page's Learn view asks here.

    GET /cairn/learn                    the map, with what is done
    GET /cairn/learn/topics/{topic}     one topic, with the newest run of each of its labs
    GET /cairn/learn/labs/{lab}         a lab and its newest run
    GET /cairn/learn/words              the words around them, in both languages

Read only: labs are run and questions are answered in the terminal. Each answer is read from the record anew, so a lab
that has just run is there after a reload. Where the server has keys, these paths ask for one as well.
"""

from msgspec.structs import asdict
from starlette.concurrency import run_in_threadpool

from cairn.labs.catalogue import all_labs
from cairn.labs.learner import Learner, lab_document, look, map_document, topic_document
from cairn.labs.wording import WORDS
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.server.api import Guarded
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.service import Service


def routes() -> list[Guarded]:
    return [
        Guarded("/cairn/learn", learn_map),
        Guarded("/cairn/learn/topics/{topic}", learn_topic),
        Guarded("/cairn/learn/labs/{lab}", learn_lab),
        Guarded("/cairn/learn/words", learn_words),
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


async def _learner() -> Learner:
    """Away from the event loop: it reads files and asks the machine."""
    return await run_in_threadpool(look)
