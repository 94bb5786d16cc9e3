"""Tools for a model whose chat template has no place for them: they are described in the system message.

    system      ... You can call functions: {"name": ...}  To call one, write <tool_call>{...}</tool_call>
    assistant   <tool_call>{"name": "f", "arguments": {...}}</tool_call>       instead of tool_calls
    user        <tool_response>...</tool_response>                             instead of the role tool

The form is that of Hermes, which most models have seen. A demanded call follows a grammar as everywhere; whether a
model that was never taught to call does so of its own accord is its own business.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cairn.serve.http.tools.tool_parser import CLOSE, OPEN

Message = dict[str, Any]
_BEFORE = "You can call functions. Each of these lines describes one:"
_AFTER = f"""To call a function, write its name and its arguments as JSON between these marks, and then stop:
{OPEN}
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
{CLOSE}"""


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """The text that a model reads about its tools."""
    lines = [msgspec.json.encode(tool.get("function", tool)).decode() for tool in tools]
    return "\n".join([_BEFORE, *lines, _AFTER])


def in_system_message(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """The conversation for a template that knows roles and text only."""
    plain = [plain_message(message) for message in messages]
    if plain and plain[0].get("role") in ("system", "developer"):
        first, plain = plain[0], plain[1:]
        text = first.get("content")
        content = _around(
            "", text, f"\n\n{describe_tools(tools)}" if text else describe_tools(tools)
        )
        return [{**first, "content": content}, *plain]
    return [{"role": "system", "content": describe_tools(tools)}, *plain]


def in_first_message(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """The same for a template that refuses the system role: everything before the first turn is in that turn."""
    system, *rest = in_system_message(messages, tools)
    if not rest:
        return [{**system, "role": "user"}]
    first, content = rest[0], system["content"]
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content if part.get("type") == "text")
    return [{**first, "content": _around(f"{content}\n\n", first.get("content"))}, *rest[1:]]


def plain_message(message: Message) -> Message:
    """A message without the fields and the role that only templates with tools know."""
    if message.get("role") == "tool":
        content = _around("<tool_response>\n", message.get("content"), "\n</tool_response>")
        return {"role": "user", "content": content}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = "\n".join(_call(call["function"]) for call in calls)
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    text = message.get("content")
    return {**kept, "content": _around("", text, f"\n{written}" if text else written)}


def _around(before: str, content: Any, after: str = "") -> Any:
    """Text in front of a content and behind it; one with pictures stays a list of parts."""
    if not isinstance(content, list):
        return f"{before}{content or ''}{after}"
    ends = [[{"type": "text", "text": text}] if text else [] for text in (before, after)]
    return [*ends[0], *content, *ends[1]]


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function.get("arguments") or {}}
    return f"{OPEN}\n{msgspec.json.encode(call).decode()}\n{CLOSE}"
