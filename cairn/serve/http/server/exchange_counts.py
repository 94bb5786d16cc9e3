"""Metrics of a request: each answer and each prompt counts once, however the request ends.

Several answers may share a prompt; they then share the list of its ids, which is how they are known here.
"""

from collections.abc import Iterable, Sequence

from cairn.core.metrics import Metrics
from cairn.serve.answer import CompletionOutput
from cairn.serve.job import Job


def first_jobs(jobs: Iterable[Job]) -> dict[int, Job]:
    """The first job of each prompt, by the identity of its ids."""
    first: dict[int, Job] = {}
    for job in jobs:
        first.setdefault(id(job.request.prompt), job)
    return first


class ExchangeCounts:
    def __init__(self, metrics: Metrics, model: str, arrived: float, jobs: Sequence[Job]) -> None:
        self._metrics, self._model, self._arrived, self._jobs = metrics, model, arrived, jobs
        self._began: dict[int, float] = {}  # when an answer had its first update
        self._ended: set[int] = set()  # answers that were counted
        self._prompts = first_jobs(jobs)  # that were not counted yet

    def first_token(self, now: float) -> None:
        """Record the first token of all answers."""
        took = now - self._arrived
        self._metrics.observe("cairn_time_to_first_token_seconds", took, model=self._model)

    def answer_began(self, index: int, now: float) -> None:
        self._began[index] = now

    def answer_ended(self, delta: CompletionOutput, now: float) -> None:
        self._ended.add(delta.index)
        metrics, model = self._metrics, self._model
        job = next(job for job in self._jobs if job.answer.index == delta.index)
        tokens = len(job.answer.whole.token_ids)
        self._count(job, tokens, delta.finish_reason or "")
        metrics.observe("cairn_request_seconds", now - self._arrived, model=model)
        if tokens > 1:
            each = (now - self._began[delta.index]) / (tokens - 1)
            metrics.observe("cairn_time_per_output_token_seconds", each, model=model)

    def closed(self) -> None:
        """Answers whose client left count as far as they were computed."""
        for job in self._jobs:
            tokens = len(job.answer.whole.token_ids)
            if tokens and job.answer.index not in self._ended:
                self._count(job, tokens, "abort")

    def _count(self, job: Job, tokens: int, reason: str) -> None:
        metrics, model = self._metrics, self._model
        metrics.add("cairn_finished_requests_total", model=model, reason=reason)
        prompt = job.request.prompt
        if (first := self._prompts.pop(id(prompt), None)) is not None:
            cached = first.request.cached
            metrics.add("cairn_prompt_tokens_total", len(prompt), model=model)
            metrics.add("cairn_cached_prompt_tokens_total", cached, model=model)
        metrics.add("cairn_generated_tokens_total", tokens, model=model)
