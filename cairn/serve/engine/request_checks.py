"""Checks whether an engine can ever serve a request; refusals state the numbers."""

from collections.abc import Iterable, Sequence

from cairn.core.errors import RequestError
from cairn.serve.engine.pieces import check_pieces
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.spans import axes_of, longest_span

LARGEST_PRIORITY = 2**63 - 1  # what a message to another process holds


class ContextExceeded(RequestError):
    """A prompt, or a prompt with its answer, that the context has no room for."""

    prompt_tokens = context = 0  # 0: not known, as behind another process

    @classmethod
    def of(cls, message: str, hint: str, prompt_tokens: int, context: int) -> "ContextExceeded":
        error = cls(message, hint)
        error.prompt_tokens, error.context = prompt_tokens, context
        return error


def check_request(request: Request, limits: Limits) -> None:
    """Refuse what can never be served, with the numbers that say why. Once is enough."""
    if request.checked:
        return
    prompt, params = request.prompt, request.params
    if not prompt:
        raise RequestError("the prompt is empty", hint="give at least one token")
    _check_place(request.priority, request.salt)
    _check_vocabulary("the prompt holds", prompt, limits.vocabulary)
    _check_vocabulary("stop_token_ids holds", params.stop_token_ids, limits.vocabulary)
    _check_vocabulary("logit_bias holds", params.logit_bias or (), limits.vocabulary)
    check_pieces(request.pieces, request.piece_rows, len(prompt), limits.arena_rows)
    if request.pieces and longest_span(request) > limits.step_tokens:
        raise RequestError(
            f"{longest_span(request)} tokens see each other both ways, a step has {limits.step_tokens}",
            hint="raise max_num_batched_tokens, or send a shorter prompt",
        )
    if request.pieces and limits.axes:
        _check_axes(request, limits.context)
    if limits.answers != "text":
        _check_text(len(prompt), params, limits.context)
        request.checked = True
        return
    _check_context(len(prompt), params, limits.context)
    _check_outputs(request, limits)
    span, needed = longest_span(request), limits.pages_for(request)
    if needed > limits.pages - 1:
        fewer = (
            f"shorten the prompt to {limits.capacity} tokens" if not span else "shorten the prompt"
        )
        raise RequestError(
            f"the prompt has {len(prompt)} tokens and needs {needed} pages of {limits.page_size}, "
            f"the whole cache has {limits.pages - 1}",
            hint=f"{fewer}, or give the cache more memory",
        )
    request.checked = True


def _check_axes(request: Request, context: int) -> None:
    """Frames far apart in time number what stands behind them beyond its position."""
    request.axes = axes_of(request.pieces, len(request.prompt))
    last, left = len(request.prompt) + request.axes.behind, context - len(request.prompt)
    answer = left if request.params.max_tokens is None else min(request.params.max_tokens, left)
    if last + answer > context:
        raise RequestError(
            f"with its pictures the prompt's numbers end at {last}, the context at {context}",
            hint="send fewer frames, or frames that are less far apart (a higher fps)",
        )


def _check_place(priority: object, salt: object) -> None:
    if type(priority) is not int:
        raise RequestError(f"priority is {priority!r}", hint="it has to be a whole number")
    if abs(priority) > LARGEST_PRIORITY:
        hint = f"it has to be between {-LARGEST_PRIORITY} and {LARGEST_PRIORITY}"
        raise RequestError("priority is a number of more than 63 bits", hint=hint)
    if not isinstance(salt, str):
        raise RequestError(f"salt is {salt!r}", hint="it has to be a string")
    if not salt.isascii() and any("\ud800" <= letter <= "\udfff" for letter in salt):
        raise RequestError("salt has half of a surrogate pair", hint="send characters whole")


def _check_text(tokens: int, params: SamplingParams, context: int) -> None:
    """Check a request to a text encoder."""
    if params.pooling is None:
        raise RequestError(
            "this model generates no text: it embeds and scores texts, or transcribes speech",
            hint="use LLM.embed, .rank, .score and .classify, or .transcribe",
        )
    if tokens > context:
        raise RequestError(
            f"the text has {tokens} tokens, the longest that the model reads has {context}",
            hint="shorten it, or have it cut with truncate_prompt_tokens: -1",
        )


def _check_context(prompt: int, params: SamplingParams, context: int) -> None:
    room = context - prompt
    if room < 1:
        raise ContextExceeded.of(
            f"the prompt has {prompt} tokens, the context is {context}",
            f"shorten the prompt to at most {context - 1} tokens, or use a longer context",
            prompt,
            context,
        )
    tokens, name = params.min_tokens, "min_tokens"
    if params.max_tokens is not None:
        tokens, name = params.max_tokens, "max_tokens"
    if tokens > room:
        raise ContextExceeded.of(
            f"{name} {tokens} and {prompt} prompt tokens exceed the context of {context}",
            f"at most {room} tokens can follow this prompt",
            prompt,
            context,
        )


def _check_outputs(request: Request, limits: Limits) -> None:
    count = len(request.outputs)
    most = request.params.max_tokens or limits.context - len(request.prompt)
    check_outputs(request.outputs, most, limits.vocabulary)
    if count and count == most:
        raise _too_long(count, most)


def check_outputs(outputs: Sequence[int], most: int, vocabulary: int) -> None:
    """Can it be the answer so far, or all of it? Before anything reads its tokens."""
    if len(outputs) > most:
        raise _too_long(len(outputs), most)
    _check_vocabulary("the answer so far holds", outputs, vocabulary)


def _too_long(count: int, most: int) -> RequestError:
    return RequestError(
        f"the answer so far has {count} tokens, and may have {most}",
        hint="it is complete: there is nothing to continue",
    )


def _check_vocabulary(where: str, tokens: Iterable[int], vocabulary: int) -> None:
    # Passes in C, not a Python loop: a prompt may have a hundred thousand tokens.
    types = set(map(type, tokens))
    if not types or (types == {int} and min(tokens) >= 0 and max(tokens) < vocabulary):
        return
    wrong = next(t for t in tokens if type(t) is not int or not 0 <= t < vocabulary)
    raise RequestError(
        f"{where} {wrong!r}, the vocabulary has {vocabulary} tokens",
        hint=f"token ids are whole numbers from 0 to {vocabulary - 1}; "
        "does the tokenizer belong to this model?",
    )
