"""Responses of /completion and /infill: one document, or the events of a stream."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from cairn.serve.answer import CompletionOutput, Logprob
from cairn.serve.http.endpoints.logprobs import Found, llama_logprobs
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.server.exchange import Exchange
from cairn.serve.http.server.sse import event_bytes
from cairn.serve.job import Job


class Wanted(NamedTuple):
    """Requested parts of the response."""

    prompts: list[str]
    tokens: bool  # the ids, in an answer that is not streamed
    probabilities: int  # of each token so many of the likeliest
    text: bool  # False: the engine samples one token, which is thrown away
    settings: list[dict[str, Any]]  # that each answer is made with
    fields: list[str]  # of the answer; none: all of them
    timings: bool  # in every event
    progress: bool  # the first event says how much of the prompt was read
    context: int


class Held:
    """Tokens of an answer whose text has not come yet."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.scores: list[dict[int, Logprob]] = []
        self.ended: CompletionOutput | None = None
        self.begun = False


class LlamaWriter:
    def __init__(self, wanted: Wanted, model: str, exchange: Exchange) -> None:
        self._wanted, self._model, self._exchange = wanted, model, exchange
        self._held = [Held() for _ in exchange.jobs]

    def write(self, delta: CompletionOutput) -> bytes:
        held, job = self._held[delta.index], self._exchange.jobs[delta.index]
        begins, held.begun = not held.begun, True
        if delta.finished:
            held.ended = delta
        held.ids += delta.token_ids
        held.scores += delta.logprobs or ()
        more: dict[str, Any] = {}
        if self._wanted.timings:
            more["timings"] = timings(self._exchange, job, len(job.answer.whole.token_ids))
        head = b""
        if begins and self._wanted.progress:
            empty = {"index": delta.index, "content": "", "tokens": [], "stop": False}
            for progress in prompt_progress(self._exchange, delta.index):
                head += event_bytes(empty | {"prompt_progress": progress} | more)
        if not delta.text or not self._wanted.text:
            return head
        piece = {"index": delta.index, "content": delta.text, "tokens": held.ids, "stop": False}
        probabilities = self._probabilities(held.ids, held.scores)
        held.ids, held.scores = [], []
        return head + event_bytes(piece | {"id_slot": 0} | probabilities | more)

    def last(self) -> bytes:
        return b"".join(map(self._last_of, self._held, self._exchange.jobs))

    def _last_of(self, held: Held, job: Job) -> bytes:
        ended = held.ended or job.answer.result()
        rest = {"text": "", "token_ids": held.ids, "logprobs": held.scores}
        return event_bytes(self.whole(msgspec.structs.replace(ended, **rest)))

    def refused(self, refusal: Refusal) -> bytes:
        return event_bytes({"error": refusal.body().error})

    def whole(self, output: CompletionOutput) -> dict[str, Any]:
        job = self._exchange.jobs[output.index]
        completion_tokens, read = len(job.answer.whole.token_ids), len(job.request.prompt)
        text = job.answer.result().text
        if not self._wanted.text:
            completion_tokens, text = 0, ""
            output = msgspec.structs.replace(output, text="", token_ids=[], logprobs=[])
        word = output.stop_reason if isinstance(output.stop_reason, str) else ""
        # An answer that is cut off where it is has met a limit, too: one on its time.
        ends = {"length": "limit", "abort": "limit", "stop": "word" if word else "eos"}
        answer = {
            "index": output.index,
            "content": output.text,
            "tokens": output.token_ids if self._wanted.tokens else [],
            "id_slot": 0,
            "stop": True,
            "model": self._model,
            "prompt": self._wanted.prompts[output.index],
            "generation_settings": self._wanted.settings[output.index],
            "has_new_line": "\n" in text,
            "tokens_predicted": completion_tokens,
            "tokens_evaluated": read,
            "tokens_cached": job.request.cached,
            "truncated": read + completion_tokens >= self._wanted.context,
            "stop_type": ends.get(output.finish_reason or "", "none"),
            "stopping_word": word,
            "timings": timings(self._exchange, job, completion_tokens),
            **self._probabilities(output.token_ids, output.logprobs or []),
        }
        return only(answer, self._wanted.fields) if self._wanted.fields else answer

    def _probabilities(self, ids: Sequence[int], scores: Sequence[Found]) -> dict[str, Any]:
        """No field where there are none, as in llama.cpp."""
        top, tokenizer = self._wanted.probabilities, self._exchange.jobs[0].answer.tokenizer
        if not top or not scores:
            return {}
        return {"completion_probabilities": llama_logprobs(ids, scores, top, tokenizer)}


def only(document: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """The fields of these names, "a/b" being the one within `a`; one that is not there is left out."""
    found = {}
    for field in fields:
        value: Any = document
        for name in field.split("/"):
            value = value.get(name, msgspec.UNSET) if isinstance(value, dict) else msgspec.UNSET
        if value is not msgspec.UNSET:
            found[field] = value
    return found


def timings(exchange: Exchange, job: Job, completion_tokens: int) -> dict[str, float]:
    """Reading the part of the prompt that no cache had, and the tokens that came after, as llama.cpp counts them."""
    prompt_s, decode_s = exchange.seconds
    read = len(job.request.prompt) - job.request.cached
    return {
        "cache_n": job.request.cached,
        "prompt_n": read,
        "prompt_ms": prompt_s * 1e3,
        "prompt_per_token_ms": prompt_s * 1e3 / read if read else 0.0,
        "prompt_per_second": read / prompt_s if prompt_s else 0.0,
        "predicted_n": completion_tokens,
        "predicted_ms": decode_s * 1e3,
        "predicted_per_token_ms": decode_s * 1e3 / completion_tokens if completion_tokens else 0.0,
        "predicted_per_second": completion_tokens / decode_s if decode_s else 0.0,
    }


def prompt_progress(exchange: Exchange, index: int = 0) -> list[dict[str, float]]:
    """The two progress reports of a prompt: at the end of its cached part, and at its end."""
    request = exchange.jobs[index].request
    total, cached = len(request.prompt), request.cached
    ends = ((cached, 0.0), (total, exchange.seconds[0] * 1e3))
    return [{"total": total, "cache": cached, "processed": at, "time_ms": ms} for at, ms in ends]
