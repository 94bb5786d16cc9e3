"""Messages as clients send them, as the template of a text model reads them.

OpenAI's content may be a list of parts; templates of text models want one string, so text parts are joined. A part that
is no text is refused: this model could only ignore it.
"""

from collections.abc import Sequence
from typing import Any

from cairn.core.errors import RequestError
from cairn.models.chat_template import check_messages
from cairn.serve.http.protocol_requests import ChatRequest, TokenizeRequest
from cairn.serve.http.service import Service
from cairn.serve.prompts import Prompt

TEXT_PARTS = ("text", "input_text", "output_text")


async def read_conversation(service: Service, asked: ChatRequest | TokenizeRequest) -> Prompt:
    """The text and the ids of a conversation, ending where the assistant begins."""
    extra = dict(asked.chat_template_kwargs or {}) if isinstance(asked, ChatRequest) else {}
    if isinstance(asked, ChatRequest) and asked.documents is not None:
        extra["documents"] = asked.documents
    tools = asked.tools or None
    if isinstance(asked, ChatRequest) and asked.tool_choice == "none":
        tools = None
    begin = asked.add_generation_prompt is not False
    for reserved in ("messages", "tools", "add_generation_prompt", "template"):
        if reserved in extra:
            raise RequestError(
                f"chat_template_kwargs has the key {reserved!r}", hint="it is set already"
            )
    messages = flat_messages(asked.messages or [])
    text = service.tokenizer.chat(messages, tools, begin, **extra)
    return Prompt(text, await service.encode(text, special=False))


def flat_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    check_messages(messages)
    return [
        {**message, "content": _joined(content, f"messages[{at}].content")}
        if isinstance(content := message.get("content"), list)
        else message
        for at, message in enumerate(messages)
    ]


def _joined(parts: list[Any], where: str) -> str:
    texts = []
    for at, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if kind in TEXT_PARTS else part if isinstance(part, str) else None
        if not isinstance(text, str):
            shown = repr(kind) if kind is not None else type(part).__name__
            raise RequestError(f"{where}[{at}] is a part of type {shown[:60]}",
                               hint='this model reads text only: {"type": "text", "text": "..."}')  # fmt: skip
        texts.append(text)
    return "\n".join(texts)
