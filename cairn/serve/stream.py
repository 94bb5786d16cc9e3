"""The answers to one prompt while they are made: `async for output in llm.stream(prompt)`.

    AnswerReader --deltas--> Stream.known --snapshot--> RequestOutput, as far as it has come

Every output holds everything so far, and in `new_text` what is new. A slow reader gets several tokens at once and
delays no other. A stream that is left (break, an exception, a cancelled task, aclose) aborts its requests in the
engine. When an answer has failed, the stream raises its error after everything before it was given out.
"""

from array import array
from typing import Self

from msgspec.structs import replace

from cairn.core.errors import CairnError
from cairn.serve.answer import CompletionOutput, RequestOutput, extend, readable_prompt
from cairn.serve.answer_reader import AnswerReader
from cairn.serve.job import Job
from cairn.serve.prompts import Prompt
from cairn.serve.serving import GenerateRequest, Serving


class Stream:
    """An asynchronous iterator. Its first use binds it to the event loop that is running then."""

    def __init__(self, serving: Serving, prompt: Prompt, request: GenerateRequest) -> None:
        # The jobs know the reader and not the stream, so that a stream without references is collected, and aborts.
        self._reader = AnswerReader()
        self._serving = serving
        self._closed = False
        self.jobs: list[Job] = []
        self.jobs = serving.jobs([request], self._reader.on_update, streamed=True)
        outputs = [
            CompletionOutput(
                index=job.answer.index, logprobs=None if job.answer.whole.logprobs is None else []
            )
            for job in self.jobs
        ]
        id = str(self.jobs[0].request.id)
        self.known = RequestOutput(  # what has been given out so far
            request_id=id, prompt=prompt.text, prompt_token_ids=prompt.token_ids, outputs=outputs
        )
        serving.submit(self.jobs)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._closed:
            raise StopAsyncIteration
        if self.known.finished:
            self._leave()
            failed = next((one.error for one in self.known.outputs if one.error), None)
            raise StopAsyncIteration if failed is None else CairnError(failed)
        try:
            deltas = await self._reader.next()
        except BaseException:  # cancelled: the rest will not be read
            self._leave()
            raise
        self._add(deltas)
        return snapshot(self.known)

    async def aclose(self) -> None:
        """Leave: what has not been computed yet will not be."""
        self._leave()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._leave()

    def __del__(self) -> None:
        self._leave()

    def _leave(self) -> None:
        if not self._closed:
            self._closed = True
            self._serving.abort(self.jobs)

    def _add(self, deltas: list[CompletionOutput]) -> None:
        for output in self.known.outputs:
            output.new_text = ""
        for delta in deltas:
            extend(self.known.outputs[delta.index], delta)
        first = self.jobs[0]
        self.known.num_cached_tokens = first.request.cached
        self.known.embedding = vector_of(first.pooled)
        if first.prompt_logprobs is not None and self.known.prompt_logprobs is None:
            self.known.prompt_logprobs = readable_prompt(
                first.request.prompt, first.prompt_logprobs, first.answer.tokenizer
            )


def vector_of(pooled: bytes | None) -> list[float] | None:
    return None if pooled is None else array("f", pooled).tolist()


def snapshot(answer: RequestOutput) -> RequestOutput:
    """A copy that later tokens do not change."""
    outputs = []
    for one in answer.outputs:
        logprobs = None if one.logprobs is None else list(one.logprobs)
        outputs.append(replace(one, token_ids=list(one.token_ids), logprobs=logprobs))
    return replace(answer, outputs=outputs)
