"""The prompt of a request that asks for the text between two others: `suffix`, and llama.cpp's /infill."""

import asyncio
from collections.abc import Sequence

from cairn.core.errors import RequestError
from cairn.models.infill import ExtraFile, infill_ids
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.server.service import LONG_TEXT, Service
from cairn.serve.prompts import Prompt


async def infill_prompt(
    service: Service,
    before: str,
    after: str,
    fields: tuple[str, str],
    files: Sequence[ExtraFile] = (),
) -> Prompt:
    """`fields`: what the request calls the two texts."""
    for text, field in zip((before, after), fields, strict=True):
        service.check_length(text, field)
    for file in files:
        service.check_length(file.text, "input_extra")
    tokenizer = service.tokenizer
    long = len(before) + len(after) + sum(len(file.text) for file in files) > LONG_TEXT
    try:
        if long:
            ids = await asyncio.to_thread(infill_ids, tokenizer, before, after, files)
        else:
            ids = infill_ids(tokenizer, before, after, files)
    except RequestError as error:
        message = f"{error.message} (hint: {error.hint})" if error.hint else error.message
        raise Refusal(400, message, param=fields[1]) from None
    return Prompt(before, ids)
