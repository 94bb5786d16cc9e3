"""Outputs of a request, assembled token by token.

    token -decoder-> text -stop strings-> text that is certain -> CompletionOutput, whole or as a delta

The names are those that vLLM's users know. An answer's text leaves out the token that ended it; its token ids do not.
A stop string ends an answer when its last character has arrived, also in the middle of a token. Knows the tokenizer,
and nothing about engines, threads or sockets.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from cairn.serve.engine.request import Finish
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.stop_strings import StopStrings

if TYPE_CHECKING:
    from cairn.models.tokenizer import Tokenizer

UNREADABLE = "the text of the answer could not be made"  # how such an error begins


class Logprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int | None  # 1 is the likeliest; None: not among those that were asked for
    decoded_token: str | None  # None: the model has no tokenizer


class CompletionOutput(msgspec.Struct, kw_only=True):
    """A completion; in a stream, the part generated so far."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: Finish | None = None  # None: it goes on
    # The stop token or string that ended it; None for end-of-text.
    stop_reason: int | str | None = None
    error: str | None = None  # why, when the reason is "error"
    new_text: str = ""  # in a stream: what the text has more than before

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


class RequestOutput(msgspec.Struct, kw_only=True):
    """A prompt, and the answers to it."""

    request_id: str
    prompt: str | None  # None: it was given as token ids
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # nothing comes before the first
    outputs: list[CompletionOutput] = []
    num_cached_tokens: int = 0  # of the prompt: found in the prefix cache
    embedding: list[float] | None = None  # the prompt as a vector, if `pooling` asked for it

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)


class ScoredToken(Protocol):
    """Log-probabilities of one token, as a runner brings them."""

    @property
    def logprob(self) -> float: ...

    @property
    def top(self) -> list[tuple[int, float]]: ...


class Unknown(msgspec.Struct, frozen=True):
    """Placeholder for log probabilities that another server computed."""

    logprob: float = 0.0
    top: list[tuple[int, float]] = []


UNKNOWN = Unknown()
# How much of an answer can be given out: pieces, tokens, their log-probability, whether it has ended. Replaced as a
# whole, so that a reader never sees half of a push; a bare tuple, because there is one for every token.
Certain = tuple[int, int, float | None, bool]
NOTHING: Certain = (0, 0, None, False)


class Answer:
    """A completion that is being generated. `take` returns what is new since the last call.

    One thread pushes, another one may take: it sees a push whole or not at all, and takes no lock.
    """

    __slots__ = (
        "_certain",
        "_decoder",
        "_pieces",
        "_stops",
        "_taken",
        "index",
        "params",
        "tokenizer",
        "whole",
    )

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        tokenizer: "Tokenizer | None",
        prompt: Sequence[int] = (),
    ) -> None:
        self.index, self.params, self.tokenizer = index, params, tokenizer
        self._decoder = None
        if tokenizer is not None:
            self._decoder = tokenizer.stream(params.skip_special_tokens, after=prompt)
        stops = [params.stop] if isinstance(params.stop, str) else params.stop
        self._stops = StopStrings(stops, params.include_stop_str_in_output)
        wants = params.logprobs is not None
        self.whole = CompletionOutput(index=index, logprobs=[] if wants else None)
        self._pieces: list[str] = []  # of the text; joined when it is read
        if wants:
            self.whole.cumulative_logprob = 0.0
        self._certain = self._taken = NOTHING  # what may be given out as deltas, and what was

    @property
    def finished(self) -> bool:
        return self.whole.finished

    def push(
        self,
        token: int,
        finish: Finish | None = None,
        stop_reason: int | str | None = None,
        logprobs: ScoredToken | None = None,
    ) -> bool:
        """The next token. True: a stop string is complete, and the engine need not go on."""
        whole = self.whole
        whole.token_ids.append(token)
        if logprobs is not None and whole.logprobs is not None:
            whole.logprobs.append(readable(token, logprobs, self.tokenizer))
            whole.cumulative_logprob = (whole.cumulative_logprob or 0.0) + logprobs.logprob
        if finish is None and not self._stops.any:  # as most are: with nothing to look for
            if self._decoder is not None:
                self._pieces.append(self._decoder.push(token))
            self._show()
            return False
        self._write(token, finish)
        if self._stops.found is not None:
            self.end("stop", self._stops.found)
            return finish is None
        if finish is not None:
            self.end(finish, stop_reason)
        else:
            self._show()
        return False

    def push_all(
        self,
        tokens: Sequence[int],
        finish: Finish | None = None,
        stop_reason: int | str | None = None,
        logprobs: Sequence[ScoredToken] | None = None,
    ) -> bool:
        """The next tokens, of which the last has the finish; what comes behind a stop string is dropped."""
        last = len(tokens) - 1
        for at, token in enumerate(tokens):
            scored = None if logprobs is None else logprobs[at]
            ends = finish if at == last and finish in ("stop", "length") else None
            if self.push(token, ends, stop_reason, scored):
                return True
            if self.finished:
                break
        return False

    def begin(self, tokens: Sequence[int]) -> None:
        """Its first tokens, made elsewhere: with log-probabilities that are not known, and not reported."""
        scored = [UNKNOWN] * len(tokens) if self.whole.logprobs is not None else None
        self.push_all(tokens, logprobs=scored)

    def end(
        self, finish: Finish, stop_reason: int | str | None = None, error: str | None = None
    ) -> None:
        """Finish the answer. Text held back by the decoder or a stop string becomes part of it."""
        if self.finished:
            return
        if self._stops.found is None:
            rest = self._decoder.flush() if self._decoder is not None else ""
            self._pieces.append(self._look(rest))
            if self._stops.found is not None:
                finish, stop_reason = "stop", self._stops.found
            self._pieces.append(self._stops.flush())
        self.whole.finish_reason, self.whole.stop_reason = finish, stop_reason
        self.whole.error = error
        self._show()

    def fail(self, problem: str) -> None:
        """Its text cannot be made: it ends with what it has, and what is held back is left where it is."""
        if not self.finished:
            self.whole.finish_reason, self.whole.error = "error", f"{UNREADABLE}: {problem}"
            self._show()

    def result(self) -> CompletionOutput:
        self.whole.text = "".join(self._pieces)
        return self.whole

    def tokens_from(self, first: int) -> list[int]:
        """The tokens from `first` on that can be returned."""
        return self.whole.token_ids[first : self._certain[1]]

    @property
    def has_update(self) -> bool:
        """Would `take` bring anything?"""
        return self._certain is not self._taken

    def take(self) -> CompletionOutput:
        """A delta: text, tokens and log-probabilities since the last one, and the end if it has come."""
        (piece, token, _, _), self._taken = self._taken, self._certain
        pieces, tokens, logprob, ended = self._taken
        whole = self.whole
        new = "".join(self._pieces[piece:pieces])
        ids = whole.token_ids[token:tokens]
        delta = CompletionOutput(index=self.index, text=new, token_ids=ids, new_text=new)
        if whole.logprobs is not None:
            delta.logprobs = whole.logprobs[token:tokens]
            delta.cumulative_logprob = logprob
        if ended:
            delta.finish_reason, delta.stop_reason = whole.finish_reason, whole.stop_reason
            delta.error = whole.error
        return delta

    def _show(self) -> None:
        whole = self.whole
        self._certain = (
            len(self._pieces),
            len(whole.token_ids),
            whole.cumulative_logprob,
            whole.finish_reason is not None,
        )

    def _write(self, token: int, finish: Finish | None) -> None:
        ends_it = finish == "stop" and not self.params.include_stop_str_in_output
        if self._decoder is not None and not ends_it:
            self._pieces.append(self._look(self._decoder.push(token)))

    def _look(self, piece: str) -> str:
        """The part of a piece that is certain; before min_tokens nothing is looked for."""
        if not self._stops.any:
            return piece
        if len(self.whole.token_ids) < self.params.min_tokens:
            return self._stops.pass_over(piece)
        return self._stops.push(piece)


def extend(answer: CompletionOutput, delta: CompletionOutput) -> None:
    """Add a delta to what is known."""
    answer.text += delta.text
    answer.token_ids += delta.token_ids
    if answer.logprobs is not None and delta.logprobs is not None:
        answer.logprobs += delta.logprobs
    answer.cumulative_logprob = delta.cumulative_logprob
    answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
    answer.error = delta.error
    answer.new_text += delta.text


def spell(piece: str | bytes | None) -> str:
    """A piece of text as a text of its own: bytes that are no character are U+FFFD."""
    return piece.decode(errors="replace") if isinstance(piece, bytes) else piece or ""


def readable(token: int, entry: ScoredToken, tokenizer: "Tokenizer | None") -> dict[int, Logprob]:
    """The likeliest tokens in their order, and the one that was chosen."""

    def spelled(id: int) -> str | None:
        return None if tokenizer is None else spell(tokenizer.piece(id))

    ranked = {
        id: Logprob(logprob, rank, spelled(id))
        for rank, (id, logprob) in enumerate(entry.top, start=1)
    }
    return (
        ranked
        if token in ranked
        else {token: Logprob(entry.logprob, None, spelled(token)), **ranked}
    )


def readable_prompt(
    prompt: Sequence[int], entries: Sequence[ScoredToken], tokenizer: "Tokenizer | None"
) -> list[dict[int, Logprob] | None]:
    """Log probabilities of each prompt token; the first has none."""
    rest = zip(prompt[1:], entries, strict=True)
    return [None, *(readable(token, row, tokenizer) for token, row in rest)]
