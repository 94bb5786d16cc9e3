"""Requests as people make them, beside the five sets that engines are compared on.

    conversations   400 questions and answers of log-normal lengths: 161 tokens in and 338 out on average
    turns           64 chats of 4 turns, each behind everything that was said before
    agents          32 agents of 6 short turns behind the same 6,000 tokens of instructions and tools
    long            8 documents of 8,000 to 120,000 tokens, 128 out; cut where the model's context is shorter
    books           8 prompts of 30,000 tokens, 128 out
    document        one request, 8,192 tokens in, 256 out
    streams         16 requests at once, 1,000 tokens in, 256 out: a small team's assistant
    brief           1,024 prompts of 1 to 16 tokens, 64 out
    sampled         conversations in which each request has its own temperature, top-p, top-k and penalty
    logprobs        conversations with the log-probabilities of the 5 likeliest tokens

Lengths come from a generator that the caller seeds. Knows nothing about engines or models.
"""

import math
import random
from collections.abc import Callable
from itertools import islice

from cairn.bench.load_prompts import chat_shapes
from cairn.bench.workload_request import Draw, WorkloadRequest, with_history

LONGEST_ANSWER = 2048
CONVERSATIONS = 400
SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 40},
    {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1.1},
    {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 0.5},
)


def _conversations(generator: random.Random, draw: Draw) -> list[WorkloadRequest]:
    shapes = chat_shapes(generator, most_out=LONGEST_ANSWER)
    return [
        WorkloadRequest(draw(shape.input_tokens), shape.output_tokens)
        for shape in islice(shapes, CONVERSATIONS)
    ]


def _turns(generator: random.Random, draw: Draw) -> list[WorkloadRequest]:
    return _dialogues(generator, draw, 64, 4, question=(50, 300), answer=(50, 300))


def _agents(generator: random.Random, draw: Draw) -> list[WorkloadRequest]:
    return _dialogues(generator, draw, 32, 6, question=(100, 400), answer=(40, 160), head=6000)


def _long(generator: random.Random, draw: Draw) -> list[WorkloadRequest]:
    """Log-uniform: as many below 31,000 tokens as above."""
    low, high = math.log(8_000), math.log(120_000)
    return [
        WorkloadRequest(draw(round(math.exp(generator.uniform(low, high)))), 128) for _ in range(8)
    ]


def _books(generator: random.Random, draw: Draw) -> list[WorkloadRequest]:
    return [WorkloadRequest(draw(30_000), 128) for _ in range(8)]


def _document(generator: random.Random, draw: Draw) -> list[WorkloadRequest]:
    return [WorkloadRequest(draw(8192), 256)]


def _streams(generator: random.Random, draw: Draw) -> list[WorkloadRequest]:
    return [WorkloadRequest(draw(1000), 256) for _ in range(16)]


def _brief(generator: random.Random, draw: Draw) -> list[WorkloadRequest]:
    return [WorkloadRequest(draw(generator.randint(1, 16)), 64) for _ in range(1024)]


def _sampled(generator: random.Random, draw: Draw) -> list[WorkloadRequest]:
    requests = _conversations(generator, draw)
    return [
        one._replace(sampling=SAMPLING[place % len(SAMPLING)]) for place, one in enumerate(requests)
    ]


def _logprobs(generator: random.Random, draw: Draw) -> list[WorkloadRequest]:
    return [one._replace(sampling={"logprobs": 5}) for one in _conversations(generator, draw)]


def _dialogues(
    generator: random.Random,
    draw: Draw,
    people: int,
    turns: int,
    question: tuple[int, int],
    answer: tuple[int, int],
    head: int = 0,
) -> list[WorkloadRequest]:
    """All first turns, then all second ones, ...: a turn follows the one that lies `people` before it."""
    begun = draw(head)
    made = []
    for place in range(people * turns):
        new = draw(generator.randint(*question))
        first = place < people
        made.append(
            WorkloadRequest(
                begun + new if first else new,
                generator.randint(*answer),
                shared=head,
                follows=None if first else place - people,
            )
        )
    return with_history(made)


EVERYDAY: dict[str, Callable[[random.Random, Draw], list[WorkloadRequest]]] = {
    "conversations": _conversations,
    "turns": _turns,
    "agents": _agents,
    "long": _long,
    "books": _books,
    "document": _document,
    "streams": _streams,
    "brief": _brief,
    "sampled": _sampled,
    "logprobs": _logprobs,
}
