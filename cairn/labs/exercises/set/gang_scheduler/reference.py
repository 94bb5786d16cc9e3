"""Which waiting jobs start now."""

from typing import NamedTuple


class Job(NamedTuple):
    name: str
    gpus: int
    seconds: float  # estimated


class Running(NamedTuple):
    gpus: int
    end: float


def start(now: float, gpus: int, running: list[Running], waiting: list[Job]) -> list[str]:
    """Names of the jobs to start, in order; `waiting` is in order of arrival and is not changed."""
    # begin answer
    waiting, running = list(waiting), list(running)
    free = gpus - sum(one.gpus for one in running)
    chosen: list[str] = []
    while waiting and waiting[0].gpus <= free:
        job = waiting.pop(0)
        chosen.append(job.name)
        running.append(Running(job.gpus, now + job.seconds))
        free -= job.gpus
    if not waiting:
        return chosen
    first = waiting.pop(0)
    available, shadow = free, float("inf")
    for one in sorted(running, key=lambda one: one.end):
        available += one.gpus
        if available >= first.gpus:
            shadow = one.end
            break
    extra = available - first.gpus
    for job in waiting:
        if job.gpus <= free and (now + job.seconds <= shadow or job.gpus <= extra):
            chosen.append(job.name)
            free -= job.gpus
            extra -= job.gpus if now + job.seconds > shadow else 0
    return chosen
    # end answer
