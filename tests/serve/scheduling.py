"""Requests, limits and turns for tests of the scheduler, in as few words as possible."""

from fake_device import EOS

from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.engine.step import Step

VOCABULARY = 1000


def limits(**fields) -> Limits:
    defaults = dict(rows=8, step_tokens=1024, context=4096, pages=1000, page_size=16)
    return Limits(**{**defaults, "vocabulary": VOCABULARY, **fields})


def make(id, prompt=4, max_tokens=100, priority=0, **params) -> Request:
    """Prompts of different requests have no token in common."""
    tokens = (
        [(id * 37 + 11 + n) % 900 + 1 for n in range(prompt)] if isinstance(prompt, int) else prompt
    )
    wanted = SamplingParams(max_tokens=max_tokens, **params)
    return Request(id, tokens, wanted, priority=priority, eos_ids=(EOS,))


def added(scheduler: Scheduler, *requests: Request) -> list[Request]:
    for request in requests:
        scheduler.add(request)
    return list(requests)


def counts(step: Step) -> list[int]:
    return [chunk.count for chunk in step.chunks]


def ids(step: Step) -> list[int]:
    return [chunk.request.id for chunk in step.chunks]


def turn(scheduler: Scheduler, token: int = 5) -> Step:
    """Schedule a step and give each that samples the same token."""
    step = scheduler.schedule()
    scheduler.update(step, [token] * len(step.sampling))
    return step


def small(**fields) -> Limits:
    """Four pages of four: two prompts of eight fit, and nothing else."""
    return limits(**{"pages": 5, "page_size": 4, "context": 200, **fields})
