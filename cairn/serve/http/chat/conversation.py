"""Messages as clients send them, as the template of a model reads them.

OpenAI's content may be a list of parts; templates of text models want one string, so text parts are joined. A part that
is no text is refused: such a model could only ignore it. Models that see keep the parts, and their pictures are loaded
and decoded beside the event loop. Clients send the arguments of past tool calls as text that holds
JSON; templates want the object itself.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from cairn.core.errors import RequestError, TokenizerError
from cairn.models.chat_template import ChatTemplates, ToolSupport, check_messages
from cairn.models.vision.conversation import has_images, with_parts
from cairn.models.vision.picture import Picture
from cairn.serve.http.chat.final_message import cut_at_mark, with_mark
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.protocol.requests import ChatRequest, TokenizeRequest
from cairn.serve.http.server.service import LONG_TEXT, Service
from cairn.serve.http.tools.generic_tools import in_first_message, in_system_message, plain_message
from cairn.serve.http.tools.tools import allowed_tools, format_of
from cairn.serve.media.decoder import DecodingBudget
from cairn.serve.prompts import Prompt

# Templates that know calls by a content of null; others take it for text, and fail.
_NULL = re.compile(r"content(?:['\"]\])? is none")
TEXT_PARTS = ("text", "input_text", "output_text")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MAY_BE_SILENT = ("assistant", "tool")  # roles whose content clients leave out where there is none


class TemplateArguments(NamedTuple):
    """Template arguments besides the messages."""

    tools: list[dict[str, Any]] | None
    begins: bool  # it ends where the assistant's answer begins
    goes_on: bool  # the last message is the beginning of the answer
    extra: dict[str, Any]


async def read_conversation(
    service: Service,
    payload: ChatRequest | TokenizeRequest,
    *,
    any_length: bool = False,
    budget: DecodingBudget | None = None,
) -> Prompt:
    """The text and the ids of a conversation, ending where the assistant begins, or goes on.

    `any_length`: it is counted or cut, and not answered as it is, so it may be longer than the context. `budget`: for
    decoding its pictures, where several reads share one.
    """
    arguments = _template_arguments(payload)
    messages, templates = payload.messages or [], templates_of(service, payload)
    picture_input = service.serving.picture_input

    def render(conversation: Sequence[Mapping[str, Any]]) -> str:
        if not arguments.goes_on:
            return _rendered(conversation, templates, arguments, picture_input is not None)
        marked = with_mark(conversation)
        return cut_at_mark(_rendered(marked, templates, arguments, picture_input is not None))

    large = is_longer([messages, arguments.tools, arguments.extra], LONG_TEXT)
    pictures: Sequence[Picture] = ()
    if picture_input is not None and (large or has_images(messages)):
        budget = budget or DecodingBudget()
        text, pictures = await picture_input.read_in_turns(messages, render, budget)
    elif picture_input is not None:
        text, pictures = picture_input.read(messages, render)  # nothing to load
    else:
        text = await asyncio.to_thread(render, messages) if large else render(messages)
    if not any_length:
        service.check_length(text, "messages")
    return Prompt(text, await service.encode(text, special=False), pictures=pictures)


C = TypeVar("C", bound=ChatRequest | TokenizeRequest)


def with_allowed_tools(payload: C) -> C:
    """The request with the tools alone that its tool_choice allows."""
    tools, choice = allowed_tools(payload.tools, payload.tool_choice)
    if choice is payload.tool_choice:
        return payload
    return msgspec.structs.replace(payload, tools=tools, tool_choice=choice)


def _template_arguments(payload: ChatRequest | TokenizeRequest) -> TemplateArguments:
    payload = with_allowed_tools(payload)
    extra: dict[str, Any] = dict(payload.chat_template_kwargs or {})
    tools = payload.tools or None
    if payload.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", payload.reasoning_effort)
    if payload.reasoning_effort == "none":
        extra.setdefault("enable_thinking", False)
    if payload.documents is not None:
        extra["documents"] = payload.documents
    if payload.tool_choice == "none":
        tools = None
    goes_on = payload.continue_final_message is True
    if goes_on and payload.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt are true", hint="set one of them"
        )
    for reserved in ("messages", "tools", "add_generation_prompt", "template"):
        if reserved in extra:
            raise RequestError(
                f"chat_template_kwargs has the key {reserved!r}", hint="it is set already"
            )
    begins = payload.add_generation_prompt is not False and not goes_on
    return TemplateArguments(tools, begins, goes_on, extra)


def _rendered(
    messages: Sequence[Mapping[str, Any]],
    templates: ChatTemplates,
    arguments: TemplateArguments,
    sees: bool,
) -> str:
    try:
        return _written(messages, templates, arguments, sees)
    except TokenizerError:
        if not any(message.get("tool_calls") for message in messages):
            raise
        return _written(messages, templates, arguments, sees, empty=True)


def _written(
    messages: Sequence[Mapping[str, Any]],
    templates: ChatTemplates,
    arguments: TemplateArguments,
    sees: bool,
    empty: bool = False,
) -> str:
    """The text of a conversation. What the template has no place for stands in messages: tools, and past calls.

    `empty`: no content beside calls is an empty text, also for templates that ask for null: some then measure it.
    """
    tools, begins, _, extra = arguments
    source = templates.sources[templates.choose(with_tools=tools is not None)]
    support = ToolSupport(True, "objects") if format_of(source) else templates.tool_support
    generic = tools is not None and not support.offered
    joins = not sees or (generic and not has_images(messages))
    silence = None if _NULL.search(source) and not empty else ""
    flat = flat_messages(messages, silence, joins=joins)
    _check_roles(flat, source)
    if "message.thinking" in source:
        flat = [_with_thinking(message) for message in flat]
    if support.calls == "texts" and not generic:
        flat = [_with_text_arguments(message) for message in flat]
    elif support.calls == "no" and tools is not None and not generic:
        flat = [plain_message(message) for message in flat]
    parts = with_parts if sees else list
    if tools is None or not generic:
        return templates.render(parts(flat), tools, begins, **extra)
    try:
        return templates.render(parts(in_system_message(flat, tools)), None, begins, **extra)
    except TokenizerError:  # a template that knows no system role
        return templates.render(parts(in_first_message(flat, tools)), None, begins, **extra)


def _check_roles(messages: Sequence[Mapping[str, Any]], template: str) -> None:
    """Most templates print any word as a role, and the model answers as if it had read a message."""
    for at, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            raise RequestError(
                f"messages[{at}].role is {role[:40]!r}",
                hint=f"it has to be {', '.join(ROLES)}, or one that the chat template names",
            )


async def without_oldest(service: Service, payload: ChatRequest, answer: int | None) -> ChatRequest:
    """The conversation without its oldest turns, as many as it takes to leave room for so many tokens.

    A turn begins with a message of the user, and what the system says first stays. Where the last turn alone is too
    long, nothing is left out: who reads it says how long it is.
    """
    messages = payload.messages
    room = service.serving.limits.context - service.reserved(answer)
    roles = [message.get("role") for message in messages]
    head = next((at for at, role in enumerate(roles) if role != "system"), len(roles))
    turns = [at for at, role in enumerate(roles) if role == "user" and at > head]
    budget = DecodingBudget()

    def from_turn(at: int) -> ChatRequest:
        return msgspec.structs.replace(payload, messages=[*messages[:head], *messages[at:]])

    async def fits(at: int) -> bool:
        prompt = await read_conversation(service, from_turn(at), any_length=True, budget=budget)
        return len(prompt.token_ids) <= room

    if await fits(head) or not turns or not await fits(turns[-1]):
        return payload
    low, high = 0, len(turns) - 1  # the first turn that fits is between them
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if await fits(turns[middle]) else (middle + 1, high)
    return from_turn(turns[low])


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """The arguments of past calls as JSON, for templates that put them into a text."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**function, "arguments": _json_text(function["arguments"])}}
        for call in message["tool_calls"]
        for function in [call["function"]]
    ]
    return {**message, "tool_calls": calls}


def _json_text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Move the reasoning of a gpt-oss tool call to the field that its template reads."""
    thought = message.get("reasoning_content")
    if not thought or message.get("content") or "thinking" in message:
        return message
    return message | {"thinking": thought}


def templates_of(service: Service, payload: ChatRequest | TokenizeRequest) -> ChatTemplates:
    """The server's templates, or the one that a trusted client has sent."""
    templates = service.tokenizer.templates
    if payload.chat_template is None:
        return templates
    if not service.config.trust_request_chat_template:
        raise Refusal(
            400,
            "chat_template is given, and this server renders conversations with its own",
            param="chat_template",
            code="chat_template_not_trusted",
        )
    return templates.replaced(payload.chat_template)


def is_longer(value: object, most: int) -> bool:
    """Does a JSON value have more than `most` characters and items? Looks at no more of it than it has to."""
    left, open_values = most, [value]
    while open_values:
        one = open_values.pop()
        if isinstance(one, dict):
            open_values += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            open_values += one
        left -= len(one) if isinstance(one, str | list | dict) else 1
        if left < 0:
            return True
    return False


def flat_messages(
    messages: Sequence[Mapping[str, Any]], silence: str | None = "", joins: bool = True
) -> list[dict[str, Any]]:
    """`silence` is the content of an answer that is nothing but tool calls. `joins`: parts become one text."""
    check_messages(messages)
    return [
        _flat(message, f"messages[{at}]", silence, joins) for at, message in enumerate(messages)
    ]


def _flat(
    message: Mapping[str, Any], where: str, silence: str | None, joins: bool
) -> dict[str, Any]:
    flat = dict(message)
    if joins and isinstance(content := message.get("content"), list):
        flat["content"] = _joined(content, f"{where}.content")
    if message.get("tool_calls") is not None:
        flat["content"] = silence if flat.get("content") is None else flat["content"]
        flat["tool_calls"] = _past_calls(message["tool_calls"], f"{where}.tool_calls")
    elif flat.get("content") is None:
        if flat.get("role") not in MAY_BE_SILENT:
            raise RequestError(
                f"{where}.content is missing", hint="it has to be text or a list of parts"
            )
        flat["content"] = ""
    return flat


def _past_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{where} is {type(calls).__name__}", hint="it has to be a list")
    past = []
    for at, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{where}[{at}] has no function with a name")
        arguments = _object(function.get("arguments"))
        past.append({**call, "function": {**function, "arguments": arguments}})
    return past


def _object(arguments: object) -> object:
    """Parse tool arguments; invalid JSON written by a model is kept as text, so that the conversation can continue."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        read = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _joined(parts: list[Any], where: str) -> str:
    texts = []
    for at, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if kind in TEXT_PARTS else part if isinstance(part, str) else None
        if not isinstance(text, str):
            name = repr(kind) if kind is not None else type(part).__name__
            raise RequestError(
                f"{where}[{at}] is a part of type {name[:60]}",
                hint='this model reads text only: {"type": "text", "text": "..."}',
            )
        texts.append(text)
    return "\n".join(texts)
