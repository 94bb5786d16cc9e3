"""Chats as people write them in files, one JSON object per line, and how they become messages.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", ...}], "tools": [...]}     OpenAI
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", ...}], "system": "..."}      ShareGPT
    {"prompt": "...", "completion": "..."}, {"question": ..., "answer": ...},
    {"instruction": "...", "input": "...", "output": "..."}                                           pairs

Anything else is refused with file and line. Knows nothing about templates or tokens.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cairn.core.errors import CairnError, DataError
from cairn.models.chat_template import check_messages
from cairn.train.data.documents import decode_line
from cairn.train.data.text_files import Advance, TextFile, lines

_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("instruction", "output"),
)


class Chat(NamedTuple):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    where: str  # file and line


def chat_lines(file: TextFile, advance: Advance) -> Iterator[tuple[str, bytes]]:
    """(where, line) of each chat, not yet parsed: workers do that."""
    if file.kind != "jsonl":
        raise DataError(
            f"{file.path} is {file.kind}; chats are read from jsonl",
            hint='one per line: {"messages": [{"role": "user", "content": "..."}, ...]}',
        )
    for number, line in lines(file, advance):
        yield f"{file.path} line {number}", line


def read_chat(line: bytes, where: str) -> Chat:
    """The chat in one line of JSON."""
    value = decode_line(line, where)
    if not isinstance(value, dict):
        raise DataError(f"{where} holds {type(value).__name__}, not an object")
    messages = _messages(value, where)
    try:
        checked = check_messages(messages)
    except CairnError as error:
        raise DataError(f"{where}: {error.message}", hint=error.hint) from None
    tools = value.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{where}: tools is {type(tools).__name__}, not a list")
    return Chat(checked, tools or None, where)


def is_chat(value: object) -> bool:
    """Return whether a JSON line is a chat in a known format; a line with the field `text` is a document."""
    if not isinstance(value, dict) or "text" in value:
        return False
    if "messages" in value or "conversations" in value:
        return True
    return any(question in value and answer in value for question, answer in _PAIRS)


def _messages(value: Mapping[str, Any], where: str) -> object:
    if "messages" in value:
        return value["messages"]
    if "conversations" in value:
        return _sharegpt(value, where)
    for prompt_field, answer_field in _PAIRS:
        if isinstance(value.get(prompt_field), str) and isinstance(value.get(answer_field), str):
            more = value.get("input")
            question = (
                f"{value[prompt_field]}\n\n{more}"
                if isinstance(more, str) and more
                else value[prompt_field]
            )
            return [
                {"role": "user", "content": question},
                {"role": "assistant", "content": value[answer_field]},
            ]
    raise DataError(
        f"{where} is no chat; it has the fields: {', '.join(map(str, value)) or 'none'}",
        hint="known are messages, conversations, and pairs: "
        + ", ".join(f"{one} + {other}" for one, other in _PAIRS),
    )


def _sharegpt(value: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    turns = value["conversations"]
    if not isinstance(turns, list):
        raise DataError(f"{where}: conversations is {type(turns).__name__}, not a list")
    messages = []
    if isinstance(value.get("system"), str) and value["system"]:
        messages.append({"role": "system", "content": value["system"]})
    for at, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise DataError(f"{where}: conversations[{at}] is {type(turn).__name__}, not an object")
        speaker = turn.get("from", turn.get("role"))
        if speaker not in _SHAREGPT_ROLES:
            roles = ", ".join(_SHAREGPT_ROLES)
            raise DataError(
                f"{where}: conversations[{at}] is from {speaker!r}", hint=f"known are {roles}"
            )
        content = turn.get("value", turn.get("content"))
        if not isinstance(content, str):
            raise DataError(f"{where}: conversations[{at}] has no text in value")
        weight = {"weight": turn["weight"]} if "weight" in turn else {}
        messages.append({"role": _SHAREGPT_ROLES[speaker], "content": content, **weight})
    return messages
