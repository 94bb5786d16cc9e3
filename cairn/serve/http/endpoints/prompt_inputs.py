"""The four forms in which a text may be given, as prompts: for completions and embeddings.

    "text" | ["text", ...] | [1, 2, 3] | [[1, 2], [3], ...]

`truncate_prompt_tokens` cuts them, as vLLM does: the last tokens stay, and before a text its BOS. Whether the ids
belong to the vocabulary and fit into the context is the engine's to check.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from cairn.models.encoder.texts import encode_texts
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.server.service import LONG_TEXT, Service
from cairn.serve.prompts import Prompt

FEW = 16  # texts; more of them are tokenized beside the event loop
FORMS = "text, a list of texts, token ids, or a list of lists of token ids"


def count_inputs(inputs: str | list[Any]) -> int:
    """Number of prompts, counted before any is tokenised."""
    return 1 if isinstance(inputs, str) or not inputs or isinstance(inputs[0], int) else len(inputs)


async def cut_inputs(
    service: Service,
    inputs: str | list[Any],
    field: str,
    most: int,
    longest: int,
    special: bool = True,
) -> list[Prompt]:
    """Read prompts and keep the last `longest` tokens of each."""
    texts = [inputs] if isinstance(inputs, str) else inputs
    if count_inputs(inputs) > most or not texts or not all(isinstance(one, str) for one in texts):
        prompts = await read_inputs(service, inputs, field, most, any_length=True)
        return [Prompt(None, one.token_ids[-longest:]) for one in prompts]
    tokenizer = service.tokenizer
    prompts = await asyncio.to_thread(encode_texts, tokenizer, texts, longest, special, "left")
    # What is left of a text is not known as text: an echo is decoded.
    return [Prompt(None, one.ids) for one in prompts]


async def read_inputs(
    service: Service,
    inputs: str | list[Any],
    field: str,
    most: int,
    special: bool = True,
    any_length: bool = False,
) -> list[Prompt]:
    """Read one or several prompts in order; `field` is the name of the body field for messages.

    `any_length`: of ids, which are cut.
    """
    if isinstance(inputs, str):
        service.check_length(inputs, field)
        return [Prompt(inputs, await service.encode(inputs, special))]
    if (count := count_inputs(inputs)) > most:
        message = f"{field} holds {count} entries; at most {most} fit into one request"
        raise Refusal(400, message, param=field)
    _check_ids(service, inputs if count == 1 and not any_length else (), field)
    kinds = {type(one) for one in inputs}
    if not inputs or len(kinds) != 1:
        what = "an empty list" if not inputs else "a list of different kinds"
        raise Refusal(400, f"{field} is {what}; it has to be {FORMS}", param=field)
    if kinds == {int}:
        return [Prompt(None, inputs)]
    if kinds == {str}:
        for text in inputs:
            service.check_length(text, field)
        many = len(inputs) > FEW or sum(map(len, inputs)) > LONG_TEXT
        encode = service.tokenizer.encode_batch
        ids = await asyncio.to_thread(encode, inputs, special) if many else encode(inputs, special)
        return [Prompt(text, text_ids) for text, text_ids in zip(inputs, ids, strict=True)]
    return [Prompt(None, list(ids)) for ids in inputs]


def _check_ids(service: Service, ids: Sequence[Any], field: str) -> None:
    """Refuse a prompt that is longer than the context before its ids are looked at."""
    context = service.serving.limits.context
    if len(ids) > context:
        message = f"the prompt has {len(ids)} tokens, the context is {context}"
        raise Refusal(
            400,
            message,
            param=field,
            code="context_length_exceeded",
            prompt_tokens=len(ids),
            context=context,
        )
