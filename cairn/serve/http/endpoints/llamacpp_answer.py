"""What /completion and /infill answer: one document, or the events of a stream. Knows no request body."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from cairn.serve.answer import CompletionOutput, Logprob
from cairn.serve.http.endpoints.logprobs import Found, llama_logprobs
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.server.exchange import Exchange
from cairn.serve.http.server.sse import event_bytes


class Wanted(NamedTuple):
    """What the request asks to be told."""

    prompt: str
    tokens: bool  # the ids, in an answer that is not streamed
    probabilities: int  # of each token so many of the likeliest
    text: bool  # False: the engine samples one token, which is thrown away


class LlamaWriter:
    def __init__(self, wanted: Wanted, model: str, exchange: Exchange) -> None:
        self._wanted, self._model, self._exchange = wanted, model, exchange
        self._ended: CompletionOutput | None = None
        # Of tokens whose text has not come yet.
        self._ids: list[int] = []
        self._scores: list[dict[int, Logprob]] = []

    def write(self, delta: CompletionOutput) -> bytes:
        if delta.finished:
            self._ended = delta
        self._ids += delta.token_ids
        self._scores += delta.logprobs or ()
        if not delta.text or not self._wanted.text:
            return b""
        piece = {"index": 0, "content": delta.text, "tokens": self._ids, "stop": False}
        probabilities = self._probabilities(self._ids, self._scores)
        self._ids, self._scores = [], []
        return event_bytes(piece | {"id_slot": 0} | probabilities)

    def last(self) -> bytes:
        ended = self._ended or self._exchange.jobs[0].answer.result()
        rest = {"text": "", "token_ids": self._ids, "logprobs": self._scores}
        return event_bytes(self.whole(msgspec.structs.replace(ended, **rest)))

    def refused(self, refusal: Refusal) -> bytes:
        return event_bytes({"error": refusal.body().error})

    def whole(self, output: CompletionOutput) -> dict[str, Any]:
        job = self._exchange.jobs[0]
        completion_tokens, read = len(job.answer.whole.token_ids), len(job.request.prompt)
        if not self._wanted.text:
            completion_tokens = 0
            output = msgspec.structs.replace(output, text="", token_ids=[], logprobs=[])
        word = output.stop_reason if isinstance(output.stop_reason, str) else ""
        # An answer that is cut off where it is has met a limit, too: one on its time.
        ends = {"length": "limit", "abort": "limit", "stop": "word" if word else "eos"}
        return {
            "index": 0,
            "content": output.text,
            "tokens": output.token_ids if self._wanted.tokens else [],
            "id_slot": 0,
            "stop": True,
            "model": self._model,
            "prompt": self._wanted.prompt,
            "tokens_predicted": completion_tokens,
            "tokens_evaluated": read,
            "tokens_cached": self._exchange.cached,
            "truncated": False,
            "stop_type": ends.get(output.finish_reason or "", "none"),
            "stopping_word": word,
            "timings": timings(self._exchange, completion_tokens),
            **self._probabilities(output.token_ids, output.logprobs or []),
        }

    def _probabilities(self, ids: Sequence[int], scores: Sequence[Found]) -> dict[str, Any]:
        """No field where there are none, as in llama.cpp."""
        top, tokenizer = self._wanted.probabilities, self._exchange.jobs[0].answer.tokenizer
        if not top or not scores:
            return {}
        return {"completion_probabilities": llama_logprobs(ids, scores, top, tokenizer)}


def timings(exchange: Exchange, completion_tokens: int) -> dict[str, float]:
    """Of the first answer: reading the part of the prompt that no cache had, and the tokens that came after."""
    prompt_s, decode_s = exchange.seconds
    read = len(exchange.jobs[0].request.prompt) - exchange.cached
    return {
        "cache_n": exchange.cached,
        "prompt_n": read,
        "prompt_ms": prompt_s * 1e3,
        "prompt_per_second": read / prompt_s if prompt_s else 0.0,
        "predicted_n": completion_tokens,
        "predicted_ms": decode_s * 1e3,
        "predicted_per_second": completion_tokens / decode_s if decode_s else 0.0,
    }
