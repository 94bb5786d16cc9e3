"""A conversation whose last message is the beginning of the answer (`continue_final_message`, a prefill).

    ... <|im_start|>assistant\\nThe capital is<|im_end|>\\n      what the template makes of it
    ... <|im_start|>assistant\\nThe capital is                  what the model goes on with

Knows no template: the last message is rendered with a mark at its end, and the text is cut there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from cairn.core.errors import RequestError

FIELD = "continue_final_message"
MARK = "\ue000go on here\ue000"  # of a private area: no text of a person has it


def with_mark(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last message, which has to be text of the assistant, ends with the mark."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        raise RequestError(
            f"{FIELD} is true, and the last message is not the assistant's",
            hint="end messages with the beginning of the answer, or leave it out",
        )
    content = None if last.get("tool_calls") else last.get("content")
    return [*messages[:-1], {**last, "content": _marked(content, len(messages) - 1)}]


def opens_thought(messages: Sequence[Mapping[str, Any]], marks: tuple[str, str]) -> bool:
    """Return whether the continued last message ends inside a reasoning block delimited by `marks`."""
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        content = content[-1].get("text")
    opening, closing = marks
    return isinstance(content, str) and content.rfind(opening) > content.rfind(closing)


def cut_at_mark(text: str) -> str:
    at = text.rfind(MARK)
    if at < 0:
        raise RequestError(
            "messages: the chat template of this model does not write the last message as it is",
            hint="let the user speak last: an answer cannot go on behind it",
        )
    return text[:at]


def _marked(content: object, at: int) -> object:
    if isinstance(content, str) and content.strip():
        return content + MARK
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        part = content[-1]
        if isinstance(part.get("text"), str) and part["text"].strip():
            return [*content[:-1], {**part, "text": part["text"] + MARK}]
    raise RequestError(
        f"messages[{at}] is the assistant's and the last one, and has no text to go on with",
        hint="let the user or a tool speak last",
    )
