"""Preparation of a chat request: engine requests, and the parsers of their output.

    ChatRequest -template-> prompt -structure-> grammar -> GenerateRequest | a Reader for each answer

Chat completions, messages and responses all begin here; how the answer is written is each endpoint's own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from cairn.core.errors import RequestError
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.http.chat.conversation import read_conversation, with_allowed_tools
from cairn.serve.http.chat.final_message import opens_thought
from cairn.serve.http.chat.reader import Reader, keeps_marks, make_readers
from cairn.serve.http.chat.reasoning import CLOSE, OPEN
from cairn.serve.http.chat.structure import grammar_for, offer_of, thinking_of
from cairn.serve.http.protocol.requests import ChatRequest
from cairn.serve.http.protocol.sampling import sampling_of
from cairn.serve.http.server.service import Service
from cairn.serve.prompts import Prompt
from cairn.serve.serving import GenerateRequest
from cairn.serve.structured_output import Guide


class PreparedChat(NamedTuple):
    prompt: Prompt
    request: GenerateRequest
    readers: list[Reader]  # one for each answer
    cut_to: int | None = None  # tokens of an answer, where more were asked for than it may have


def _cut(prompt: Prompt, longest: int) -> Prompt:
    """The last tokens of a conversation, as it was rendered; its text still says how it ends."""
    if prompt.pictures and len(prompt.token_ids) > longest:
        message = "truncate_prompt_tokens would cut a conversation with pictures"
        raise RequestError(message, hint="send fewer messages or smaller pictures")
    return prompt._replace(token_ids=prompt.token_ids[-longest:])


async def prepare_chat(
    service: Service,
    chat: ChatRequest,
    guide: Guide | None,
    max_tokens: int | None,
    logprobs: int | None = None,
    before: Sequence[int] = (),
) -> PreparedChat:
    """`guide`: the shape that the answer has to have; `before`: tokens of an earlier prompt and its answer."""
    chat = with_allowed_tools(chat)
    offer = offer_of(service, chat)
    longest = service.most_prompt_tokens(chat.truncate_prompt_tokens, max_tokens)
    prompt = await read_conversation(service, chat, any_length=longest is not None)
    if longest is not None:
        prompt = _cut(prompt, longest)
    if before:
        prompt = prompt._replace(token_ids=[*before, *prompt.token_ids])
    thinking = thinking_of(service, prompt.text or "")
    goes_on = chat.continue_final_message is True and thinking != "channels"
    if goes_on and opens_thought(chat.messages, (OPEN, CLOSE)):
        thinking = "begun"
    grammar = await grammar_for(service, guide, offer, thinking)
    guided = grammar is not None
    most = service.most_tokens(max_tokens, len(prompt.token_ids))
    sampling = sampling_of(chat, service.serving.sampling)
    params = SamplingParams(
        **sampling, max_tokens=most, logprobs=logprobs, prompt_logprobs=chat.prompt_logprobs
    )
    if keeps_marks(service.tokenizer, offer, thinking, guided):
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    request = GenerateRequest(
        prompt.token_ids,
        params,
        chat.priority or 0,
        chat.cache_salt or "",
        grammar,
        pictures=prompt.pictures,
    )
    cut_to = most if max_tokens is not None and most != max_tokens else None
    return PreparedChat(prompt, request, make_readers(offer, thinking, guided, params.n), cut_to)
