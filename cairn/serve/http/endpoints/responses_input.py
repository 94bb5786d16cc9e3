"""Conversion of /v1/responses requests to chat-template messages.

    message                               ->  a message
    reasoning, message, function_call ... ->  one message of the assistant: reasoning_content, content, tool_calls
    function_call_output                  ->  a message of the role "tool"
    tools: name, parameters               ->  functions

An item of another type is refused: it would need something that this server does not run or keep.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from cairn.core.errors import RequestError
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.protocol.requests import ChatRequest
from cairn.serve.http.protocol.responses import FunctionTool, ResponsesRequest
from cairn.serve.structured_output import Guide, schema_guide

LOGPROBS = "message.output_text.logprobs"
UNSUPPORTED = ("conversation", "background", "prompt", "top_logprobs")
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def as_chat(
    payload: ResponsesRequest, before: Sequence[dict[str, Any]] = (), sees: bool = False
) -> ChatRequest:
    """Refusal or RequestError names what is wrong, and where. `before`: the items that the input goes on from."""
    for name in UNSUPPORTED:
        if getattr(payload, name):
            message = f"{name} is not supported by this server"
            raise Refusal(400, message, param=name, code="unsupported")
    if LOGPROBS in (payload.include or ()):
        message = f"include has {LOGPROBS!r}; send logprobs to /v1/chat/completions"
        raise Refusal(400, message, param="include", code="unsupported")
    items = items_of(payload)
    if not items:
        raise RequestError("input is empty", hint="it has to be text, or a list of items")
    first = [{"role": "system", "content": payload.instructions}] if payload.instructions else []
    earlier = translated(before, sees) if before else []
    chat = ChatRequest(messages=first + earlier + translated(items, sees))
    chat.temperature, chat.top_p = payload.temperature, payload.top_p
    chat.priority = payload.priority
    if payload.tools:
        chat.tools = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(payload.tools)]
    chat.tool_choice, chat.parallel_tool_calls = payload.tool_choice, payload.parallel_tool_calls
    if payload.reasoning is not None and (effort := payload.reasoning.effort) is not None:
        kwargs = {"enable_thinking": effort != "none", "reasoning_effort": effort}
        chat.chat_template_kwargs = kwargs
    return chat


def items_of(payload: ResponsesRequest) -> list[dict[str, Any]]:
    """The input as a list of items; a text is a message of the user."""
    if isinstance(payload.input, str):
        return [{"role": "user", "content": payload.input}]
    return payload.input


def listed_items(items: Sequence[dict[str, Any]], response: str) -> list[dict[str, Any]]:
    """Items as OpenAI's client reads them back: each with an id, the texts of messages as parts."""
    short, items_listed = response.removeprefix("resp_"), []
    for at, item in enumerate(items):
        kind, content = item.get("type", "message"), item.get("content")
        listed = {"id": f"{PREFIXES.get(kind, 'item')}_{short}_in{at}", **item, "type": kind}
        if kind == "message" and isinstance(content, str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            listed["content"] = [{"type": part, "text": content}]
        items_listed.append({"status": "completed", **listed} if kind == "message" else listed)
    return items_listed


def guide_of(payload: ResponsesRequest) -> Guide | None:
    shape = None if payload.text is None else payload.text.format
    if shape is None or shape.type == "text":
        return None
    if shape.type == "json_object":
        return schema_guide({"type": "object"}, "text.format")
    if shape.schema is None:
        raise Refusal(400, "text.format.schema is missing", param="text.format.schema")
    return schema_guide(shape.schema, "text.format.schema")


def translated(items: Sequence[dict[str, Any]], sees: bool) -> list[dict[str, Any]]:
    """The items as messages; what the assistant thought, said and called in one turn is one message.

    `sees`: the model reads images, whose parts are kept.
    """
    messages: list[dict[str, Any]] = []
    for at, item in enumerate(items):
        where = f"input[{at}]"
        kind = item.get("type", "message")
        match kind:
            case "message":
                _add_message(messages, item, where, sees)
            case "reasoning":
                thought = _texts(
                    item.get("content") or item.get("summary") or [], f"{where}.content"
                )
                _assistant_message(messages, fresh=True)["reasoning_content"] = thought
            case "function_call":
                _assistant_message(messages).setdefault("tool_calls", []).append(
                    _past_call(item, where)
                )
            case "function_call_output":
                id = _text_field(item, "call_id", where)
                message = _texts(item.get("output", ""), f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": id, "content": message})
            case _:
                message = f"{where}.type is {str(kind)[:40]!r}"
                raise RequestError(message, hint=f"it has to be {', '.join(ITEMS)}")
    return messages


def _add_message(
    messages: list[dict[str, Any]], item: dict[str, Any], where: str, sees: bool
) -> None:
    name = item.get("role")
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        message = f"{where}.role is {str(name)[:40]!r}"
        raise RequestError(message, hint=f"it has to be {', '.join(ROLES)}")
    content = item.get("content")
    text = (_parts if sees else _texts)(content, f"{where}.content")
    if role == "assistant" and messages and messages[-1].get("content", "") is None:
        messages[-1]["content"] = text  # behind its thought
    else:
        messages.append({"role": role, "content": text})


def _assistant_message(messages: list[dict[str, Any]], fresh: bool = False) -> dict[str, Any]:
    """The assistant's message that goes on here; one that has only begun has the content None."""
    if fresh or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _past_call(item: dict[str, Any], where: str) -> dict[str, Any]:
    function = {
        "name": _text_field(item, "name", where),
        "arguments": _text_field(item, "arguments", where),
    }
    return {"id": _text_field(item, "call_id", where), "type": "function", "function": function}


def _parts(content: object, where: str) -> str | list[dict[str, Any]]:
    """Text content, or a list of parts if there are images."""
    images = isinstance(content, list) and any(map(_is_image, content))
    if not isinstance(content, list) or not images:
        return _texts(content, where)
    return [
        part if _is_image(part) else {"type": "text", "text": _texts([part], where, at)}
        for at, part in enumerate(content)
    ]


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "input_image"


def _texts(content: object, where: str, first: int = 0) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        name = "missing" if content is None else type(content).__name__
        raise RequestError(f"{where} is {name}", hint="it has to be text or a list of text parts")
    texts = []
    for at, part in enumerate(content, first):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if not isinstance(part, dict) or kind not in TEXTS:
            raise RequestError(
                f"{where}[{at}] is a part of type {str(kind)[:40]!r}",
                hint='this model reads text only: {"type": "input_text", "text": "..."}',
            )
        texts.append(_text_field(part, "text", f"{where}[{at}]"))
    return "\n".join(texts)


def _text_field(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        kind = "missing" if value is None else type(value).__name__
        raise RequestError(f"{where}.{name} is {kind}", hint="it has to be text")
    return value


def _tool(tool: FunctionTool, where: str) -> dict[str, Any]:
    if tool.type != "function":
        message = f"{where}.type is {tool.type[:60]!r}"
        raise RequestError(message, hint="this server runs no tools itself: it has to be function")
    function = msgspec.to_builtins(tool)
    del function["type"]
    kept = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": kept}
