"""Job: an engine request, its answer, and the reader that is notified of updates."""

from collections.abc import Callable, Sequence

from cairn.serve.answer import Answer, ScoredToken
from cairn.serve.engine.request import Request
from cairn.serve.structured_output import Guide


class Job:
    """A request and its answer. `on_update` is called in the engine's thread: it returns at once and raises nothing."""

    __slots__ = (
        "_begun",
        "answer",
        "detokenize_s",
        "encoded",
        "guide",
        "max_tokens",
        "on_update",
        "pooled",
        "prompt_logprobs",
        "request",
        "result",
        "streamed",
    )

    def __init__(
        self,
        request: Request,
        answer: Answer,
        max_tokens: int,
        on_update: Callable[["Job"], None],
        *,
        streamed: bool = True,
        guide: Guide | None = None,
    ) -> None:
        self.request, self.answer, self.max_tokens = request, answer, max_tokens
        self.on_update, self.streamed = on_update, streamed
        # The source of the request's constraint, for an engine in another process.
        self.guide = guide
        self.encoded: tuple[int, bytes] | None = None  # its number there, and the message to it
        # Of the tokens behind the first: of a prompt of one token there is nothing to find.
        alone = request.params.prompt_logprobs is not None and len(request.prompt) == 1
        self.prompt_logprobs: Sequence[ScoredToken] | None = [] if alone else None
        self.pooled: bytes | None = None  # the prompt as a vector of float32, if that was asked for
        self.result: object = None  # of a job that is computed whole: a transcript
        self.detokenize_s = 0.0  # seconds that its text took to make
        self._begun = False

    def updated(self) -> None:
        """Tell the reader: after every token of a streamed answer; else after the first token and at the end."""
        if self.streamed or not self._begun or self.answer.finished:
            self._begun = True
            self.on_update(self)
