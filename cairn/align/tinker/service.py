"""The queue in front of the one model: who asked for what, in which order it is done, and what came of it.

    submit(model, order, work) -> future      work of a model runs in the order of its numbers, however it arrives
    sample(...)                -> future      samples of the same weights that wait together run as one batch

One thread does all work, so that a sample sees the weights of whole steps. A future is kept until it was read or its
time is over; a request that comes twice, because its answer was lost, gets the same future. Knows no HTTP.
"""

import itertools
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from cairn.align.policy import Sampled
from cairn.align.tinker.shared_base import SharedBase, Weights
from cairn.align.tinker.wire import Sample, SampledTokens, Samples, write_samples
from cairn.core.errors import CairnError, RequestError
from cairn.serve.engine.sampling_params import MOST_SEQUENCES, SamplingParams

KEPT_S = 3600.0  # how long an answer that is not fetched is kept
READ_S = 120.0  # and one that was read: its reader may not have got it
PURGE_S = 10.0
Answer = bytes | dict  # protobuf, or what becomes JSON


class Failure(NamedTuple):
    message: str
    category: str  # user: the request was wrong; server: we were


class Future:
    """Result of a request in progress."""

    def __init__(self, id: str) -> None:
        self.id, self.born = id, time.monotonic()
        self.answer: Answer | Failure | None = None
        self.read_at: float | None = None
        self.done = threading.Event()
        self.waiters: list[Callable[[], object]] = []  # called from the worker's thread

    def stale(self, now: float) -> bool:
        if self.answer is None:
            return False
        return now - self.born > KEPT_S or (
            self.read_at is not None and now - self.read_at > READ_S
        )

    def settle(self, answer: Answer | Failure) -> None:
        self.answer = answer
        self.done.set()
        for call in tuple(self.waiters):  # who is called leaves the list, in another thread
            call()


class Waiting(NamedTuple):
    future: Future
    weights: Weights
    request: Sample


class Order:
    """The work of one model, which arrives in any order and is done by number, from 1."""

    def __init__(self) -> None:
        self.next = 1
        self.early: dict[int, tuple[Future, Callable[[], Answer]]] = {}
        self.futures: dict[int, Future] = {}  # of every number that has come, to answer twice


class Service:
    """The model and its queue; `close` ends the thread."""

    def __init__(self, base: SharedBase) -> None:
        self.base = base
        self.futures: dict[str, Future] = {}
        self._orders: dict[str, Order] = {}
        self._work: deque[tuple[Future, Callable[[], Answer]]] = deque()
        self._samples: deque[Waiting] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._numbers = itertools.count(1)
        self._purged = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name="tinker")
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    # -- asking ---------------------------------------------------------------------------------

    def now(self, work: Callable[[], Answer]) -> Future:
        """Work that belongs to no order, such as making a model."""
        with self._changed:
            future = self._new(f"request-{next(self._numbers)}-{uuid.uuid4().hex[:8]}")
            self._work.append((future, work))
            self._changed.notify()
        return future

    def submit(self, model: str, number: int, work: Callable[[], Answer]) -> Future:
        with self._changed:
            order = self._orders.setdefault(model, Order())
            if number in order.futures:
                return order.futures[number]
            if number < order.next:
                raise RequestError(f"request {number} of {model} came after {order.next - 1}")
            future = order.futures[number] = self._new(f"{model}:{number}")
            order.early[number] = (future, work)
            while order.next in order.early:
                self._work.append(order.early.pop(order.next))
                order.futures.pop(order.next - 1000, None)
                order.next += 1
            self._changed.notify()
        return future

    def forget(self, model: str) -> None:
        """Its client is gone."""
        with self._changed:
            self._orders.pop(model, None)

    def sample(self, id: str, weights: Weights, request: Sample) -> Future:
        check_sample(self.base, request)
        with self._changed:
            if id in self.futures:
                return self.futures[id]
            future = self._new(id)
            self._samples.append(Waiting(future, weights, request))
            self._changed.notify()
        return future

    def _new(self, id: str) -> Future:
        now = time.monotonic()
        if now - self._purged > PURGE_S:
            self._purged = now
            self.futures = {k: one for k, one in self.futures.items() if not one.stale(now)}
        future = self.futures[id] = Future(id)
        return future

    # -- doing ----------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._work or self._samples or self._closed):
                    self._changed.wait()
                if self._closed:
                    return
                work = self._work.popleft() if self._work else None
                samples = [] if work else self._batch()
            if work:
                work[0].settle(attempted(work[1]))
            elif samples:
                self._sample(samples)

    def _batch(self) -> list[Waiting]:
        """All that wait for the weights of the first one."""
        version = self._samples[0].weights.version
        chosen = [one for one in self._samples if one.weights.version == version]
        left = [one for one in self._samples if one.weights.version != version]
        self._samples = deque(left)
        return chosen

    def _sample(self, batch: list[Waiting]) -> None:
        try:
            answers = self._sampled(batch)
        except Exception as problem:  # noqa: BLE001 (each asker gets it)
            answers = [failure(problem)] * len(batch)
        for one, answer in zip(batch, answers, strict=True):
            one.future.settle(answer)

    def _sampled(self, batch: list[Waiting]) -> "list[Answer | Failure]":
        prompts, stops = [], []
        for one in batch:
            params, texts = sampling_of(one.request)
            prompt = one.request.prompt.tokens()
            for at in range(one.request.num_samples):
                prompts.append((prompt, _numbered(params, at)))
                stops.append(texts)
        samples = iter(self.base.sample(batch[0].weights, prompts, stops))
        return [
            write_samples(
                samples_of(one.request, [next(samples) for _ in range(one.request.num_samples)])
            )
            for one in batch
        ]


def attempted(work: Callable[[], Answer]) -> Answer | Failure:
    try:
        return work()
    except Exception as problem:  # noqa: BLE001 (its asker gets it)
        return failure(problem)


def failure(problem: Exception) -> Failure:
    """Convert an exception to the client's error; internal errors include their type."""
    if isinstance(problem, CairnError):
        return Failure(str(problem), "user")
    return Failure(f"{type(problem).__name__}: {problem}", "server")


def check_sample(base: SharedBase, request: Sample) -> None:
    """Refuses at once what could not be answered."""
    prompt = request.prompt.tokens()
    if request.target_prompt_logprobs is not None or request.prompt_alt_tokens_k:
        raise RequestError("target_prompt_logprobs and prompt_alt_tokens_k are not offered here")
    if not 1 <= request.num_samples <= MOST_SEQUENCES:
        raise RequestError(
            f"num_samples is {request.num_samples}", hint=f"ask for 1 to {MOST_SEQUENCES}"
        )
    if not 0 < len(prompt) < base.length:
        raise RequestError(f"a prompt of {len(prompt)} tokens; 1 to {base.length - 1} are possible")
    if min(prompt) < 0 or max(prompt) >= base.spec.vocab:
        raise RequestError(
            f"token ids from {min(prompt)} to {max(prompt)}, the model has {base.spec.vocab}"
        )
    most = request.sampling_params.max_tokens
    if most is not None and len(prompt) + most > base.length:
        raise RequestError(
            f"{len(prompt)} tokens of prompt and {most} new ones are more than {base.length}",
            hint="ask for fewer, or start the server with a larger --max-model-len",
        )
    params, _ = sampling_of(request)
    unknown = [one for one in params.stop_token_ids if not 0 <= one < base.spec.vocab]
    if unknown:
        raise RequestError(f"stop has the token {unknown[0]}, the model has {base.spec.vocab}")


def sampling_of(request: Sample) -> tuple[SamplingParams, list[str]]:
    """Convert sampling parameters for the engine, and the stop strings."""
    settings = request.sampling_params
    stop = [settings.stop] if isinstance(settings.stop, str) else settings.stop
    prompt = request.topk_prompt_logprobs if request.prompt_logprobs else None
    params = SamplingParams(
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        seed=settings.seed,
        max_tokens=settings.max_tokens,
        ignore_eos=stop == [],
        stop_token_ids=[one for one in stop or () if isinstance(one, int)],
        logprobs=request.topk_sample_logprobs,
        prompt_logprobs=prompt,
    )
    return params, [one for one in stop or () if isinstance(one, str)]


def _numbered(params: SamplingParams, at: int) -> SamplingParams:
    """Samples of one request differ, also where it has a seed."""
    if params.seed is None or not at:
        return params
    return msgspec.structs.replace(params, seed=(params.seed + at) % (1 << 63))


def samples_of(request: Sample, samples: list[Sampled]) -> Samples:
    sequences = [
        SampledTokens(
            one.tokens, one.logp, one.stopped, one.top if request.topk_sample_logprobs else []
        )
        for one in samples
    ]
    first = samples[0].prompt_logprobs
    if first is None:
        return Samples(sequences, cached=samples[0].cached)
    values: list[float | None] = [None, *[one.logprob for one in first]]
    if request.prompt_logprobs_last_n:
        last = request.prompt_logprobs_last_n
        values = [None] * (len(values) - last) + values[-last:]
    top = [[], *[one.top for one in first]] if request.topk_prompt_logprobs else None
    return Samples(sequences, values, top, samples[0].cached)
