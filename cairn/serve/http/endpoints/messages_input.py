"""Conversion of Anthropic requests to chat-template messages.

    assistant: text, tool_use, thinking blocks    ->  one message: content, tool_calls, reasoning_content
    user: tool_result blocks, then text           ->  a message of the role "tool" for each, then one of the user
    tools: name, input_schema                     ->  functions with parameters
    tool_choice: any, tool, auto, none            ->  required, a name, auto, none

Images stay parts of their message; a block that is nothing of this is refused: a model could only ignore it.
"""

from typing import Any

from cairn.core.errors import RequestError
from cairn.serve.http.protocol.messages import (
    CountRequest,
    CustomTool,
    MessagesRequest,
    ToolChoice,
)
from cairn.serve.http.protocol.requests import ChatRequest
from cairn.serve.structured_output import Guide, schema_guide

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
SAMPLING = ("temperature", "top_p", "top_k")


def as_chat(payload: CountRequest) -> ChatRequest:
    """RequestError names what is wrong, and where."""
    messages = _system(payload.system)
    for at, message in enumerate(payload.messages):
        messages += _translated(message, f"messages[{at}]")
    if not payload.messages:
        raise RequestError(
            "messages is empty", hint='send at least {"role": "user", "content": "..."}'
        )
    if payload.mcp_servers:
        raise RequestError("mcp_servers is given", hint="this server runs no tools itself")
    chat = ChatRequest(messages=messages)
    if payload.messages[-1].get("role") == "assistant":  # the beginning of the answer
        chat.continue_final_message = True
    if payload.tools:
        chat.tools = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(payload.tools)]
    if payload.tool_choice is not None:
        chat.tool_choice = _choice(payload.tool_choice)
        if (single := payload.tool_choice.disable_parallel_tool_use) is not None:
            chat.parallel_tool_calls = not single
    if payload.thinking is not None:
        chat.chat_template_kwargs = {"enable_thinking": payload.thinking.type != "disabled"}
    if isinstance(payload, MessagesRequest):
        for name in SAMPLING:
            setattr(chat, name, getattr(payload, name))
        chat.stop = payload.stop_sequences
        for at, text in enumerate(payload.stop_sequences or ()):
            if not text:
                raise RequestError(
                    f"stop_sequences[{at}] is ''", hint="it has to be text that is not empty"
                )
    return chat


def guide_of(payload: CountRequest) -> Guide | None:
    shape = None if payload.output_config is None else payload.output_config.format
    if shape is not None:
        return schema_guide(shape.schema, "output_config.format.schema")
    older = payload.output_format
    return None if older is None else schema_guide(older.schema, "output_format.schema")


def _system(system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if not system:
        return []
    parts = [{"type": "text", "text": system}] if isinstance(system, str) else system
    texts = [_text(part, f"system[{at}]") for at, part in enumerate(parts)]
    return [{"role": "system", "content": "\n".join(texts)}]


def _translated(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise RequestError(
            f"{where}.role is {str(role)[:40]!r}", hint="it has to be user or assistant"
        )
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(
            f"{where}.content is {type(content).__name__}",
            hint="it has to be text or a list of blocks",
        )
    blocks = []
    for at, block in enumerate(content):
        if not isinstance(block, dict):
            raise RequestError(
                f"{where}.content[{at}] is {type(block).__name__}", hint="it has to be an object"
            )
        blocks.append((block, f"{where}.content[{at}]"))
    return [_assistant_message(blocks)] if role == "assistant" else _user_messages(blocks)


def _assistant_message(blocks: list[tuple[dict[str, Any], str]]) -> dict[str, Any]:
    """Text, thoughts and calls as one message."""
    texts, thoughts, calls = [], [], []
    for block, where in blocks:
        match block.get("type"):
            case "tool_use":
                calls.append(_past_call(block, where))
            case "thinking":
                thoughts.append(_text_field(block, "thinking", where))
            case "redacted_thinking":
                continue  # it is encrypted
            case _:
                texts.append(_text(block, where))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
        message["content"] = message["content"] or None
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _user_messages(blocks: list[tuple[dict[str, Any], str]]) -> list[dict[str, Any]]:
    """A message for each tool result, then one of the user."""
    results: list[dict[str, Any]] = []
    said_here: list[dict[str, Any]] = []  # text and images, in order
    for block, where in blocks:
        if block.get("type") != "tool_result":
            said_here.append(_said(block, where))
            continue
        content = block.get("content")
        if isinstance(content, list):  # images of a result follow it, in the user's message
            said_here += [part for part in content if _is_image(part)]
            content = [part for part in content if not _is_image(part)]
        result = _result(content, f"{where}.content")
        result = f"Error: {result}" if block.get("is_error") is True else result
        id = _text_field(block, "tool_use_id", where)
        results.append({"role": "tool", "tool_call_id": id, "content": result})
    if said_here or not results:
        results.append({"role": "user", "content": joined_texts(said_here)})
    return results


def _said(block: dict[str, Any], where: str) -> dict[str, Any]:
    return block if _is_image(block) else {"type": "text", "text": _text(block, where)}


def _is_image(block: object) -> bool:
    return isinstance(block, dict) and block.get("type") == "image"


def joined_texts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Join text parts; with images the parts are returned unchanged."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _past_call(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = block.get("input", {})
    if not isinstance(arguments, dict):
        raise RequestError(
            f"{where}.input is {type(arguments).__name__}", hint="it has to be an object"
        )
    function = {"name": _text_field(block, "name", where), "arguments": arguments}
    return {"id": _text_field(block, "id", where), "type": "function", "function": function}


def _result(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(
            f"{where} is {type(content).__name__}",
            hint="it has to be text or a list of text blocks",
        )
    return "\n".join(_text(part, f"{where}[{at}]") for at, part in enumerate(content))


def _text(block: object, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or kind != "text":
        name = repr(kind)[:60] if isinstance(block, dict) else type(block).__name__
        raise RequestError(
            f"{where} is a block of type {name}",
            hint='this model reads text only: {"type": "text", "text": "..."}',
        )
    return _text_field(block, "text", where)


def _text_field(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        kind = "missing" if value is None else type(value).__name__
        raise RequestError(f"{where}.{name} is {kind}", hint="it has to be text")
    return value


def _tool(tool: CustomTool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"{where}.type is {tool.type[:60]!r}",
            hint="this server runs no tools itself: describe yours with name and input_schema",
        )
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type != "tool":
        return CHOICES[choice.type]
    if choice.name is None:
        raise RequestError(
            "tool_choice.name is missing", hint='type "tool" calls the one of this name'
        )
    return {"type": "function", "function": {"name": choice.name}}
