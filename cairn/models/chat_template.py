"""Rendering of conversations with the chat template of a model.

Chooses among a model's templates, checks the conversation, and hands the template plain JSON values only. It
knows nothing about tokens or ids; Jinja itself is behind `template_sandbox` and is loaded with the first chat.

    messages, tools, documents -check, copy-> plain values -template-> "<|im_start|>user Hi<|im_end|> ..."
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from cairn.core.errors import ConfigError, RequestError, TokenizerError

if TYPE_CHECKING:
    from cairn.models.template_sandbox import SandboxedTemplate

# For models that have none, as with llama.cpp and most tools beside it.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Plain = None | bool | int | float | str | list["Plain"] | dict[str, "Plain"]

# The names under which clients send what a model thought; the first is the one that templates read.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_MAX_DEPTH = 100  # of values within values
_PROBE, _ARGUMENT = "probe_of_tools", "probe_argument"  # names that stand in no template


class ToolSupport(NamedTuple):
    """Tool support of a template."""

    offered: bool  # the tools that the model may call
    # Past calls and their results: not, or with arguments as an object (most templates) or as JSON in a text.
    calls: Literal["no", "objects", "texts"]


class ChatTemplates:
    """The templates of one model by name; most have a single one, called default."""

    def __init__(self, sources: Mapping[str, str], special: Mapping[str, str], owner: str) -> None:
        self.sources = dict(sources)
        self._special = dict(special)
        self._owner = owner
        self._compiled: dict[str, SandboxedTemplate] = {}

    def __bool__(self) -> bool:
        return bool(self.sources)

    def replaced(self, source: str) -> "ChatTemplates":
        """The same model with this one template."""
        return ChatTemplates({"default": source}, self._special, self._owner)

    @functools.cached_property
    def tool_support(self) -> ToolSupport:
        """Found out by rendering: templates differ too much for their source to tell."""
        if not self.sources:
            return ToolSupport(False, "no")
        schema = {
            "type": "object",
            "properties": {_ARGUMENT: {"type": "string", "description": "?"}},
        }
        function = {"name": _PROBE, "description": "?", "parameters": schema}
        tools = [{"type": "function", "function": function}]

        def writes(text: str, *messages: Mapping[str, Any]) -> bool:
            for asked in ("?", [{"type": "text", "text": "?"}]):
                try:
                    written = self.render([{"role": "user", "content": asked}, *messages], tools)
                except TokenizerError:
                    continue
                if text in written:
                    return True
            return False

        def writes_call(arguments: object) -> bool:
            function = {"name": _PROBE, "arguments": arguments}
            call = {"type": "function", "id": "call00000", "function": function}
            said = {"role": "assistant", "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": "call00000", "name": _PROBE, "content": "?"}
            return any(
                writes("probe of a call", said | {"content": content}, result)
                for content in ("", None)
            )

        if writes_call({_ARGUMENT: "probe of a call"}):
            calls = "objects"
        else:
            calls = "texts" if writes_call(f'{{"{_ARGUMENT}": "probe of a call"}}') else "no"
        return ToolSupport(writes(_PROBE), calls)

    def choose(self, with_tools: bool, name: str | None = None) -> str:
        """The name of the template to use; tool_use where tools are given and the model has one."""
        if not self.sources:
            raise TokenizerError(
                f"{self._owner} has no chat template, so it cannot take messages",
                hint="use plain text completion, a model that was tuned for chat (often named Instruct or Chat), "
                "or `cairn serve --chat-template FILE`",
            )
        if name is None:
            name = "tool_use" if with_tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise TokenizerError(
                f"{self._owner} has no chat template named {name!r}",
                hint=f"choose one with template=: {', '.join(sorted(self.sources))}",
            )
        return name

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        documents: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        name = self.choose(tools is not None, template)
        if name not in self._compiled:
            from cairn.models.template_sandbox import SandboxedTemplate

            self._compiled[name] = SandboxedTemplate(self.sources[name], self._owner, name)
        checked = {
            "messages": [_with_reasoning_names(message) for message in check_messages(messages)],
            "tools": None if tools is None else _check_objects(tools, "tools"),
            "documents": None if documents is None else _check_objects(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        extra = {key: plain(value, key) for key, value in variables.items()}
        return self._compiled[name].render({**self._special, **extra, **checked})


def read_template(file: Path) -> str:
    """The text of a template's file; ConfigError: there is none."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = (
            f"the chat template {file} cannot be read: {getattr(error, 'strerror', None) or error}"
        )
        raise ConfigError(message, hint="give a file with a Jinja template") from None
    if not text.strip():
        raise ConfigError(
            f"the chat template {file} is empty", hint="it has to be a Jinja template"
        )
    return text


def check_messages(messages: object) -> list[dict[str, Plain]]:
    """A plain copy of the messages, or RequestError with the place of the first thing that is wrong."""
    checked = _check_objects(messages, "messages")
    if not checked:
        raise RequestError(
            "messages is empty", hint='send at least {"role": "user", "content": "..."}'
        )
    for at, message in enumerate(checked):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise RequestError(
                f"messages[{at}].role is {role!r}",
                hint="a role is a word: system, user, assistant, tool",
            )
        if content is not None and not isinstance(content, str | list):
            raise RequestError(
                f"messages[{at}].content is {type(content).__name__}, not text or a list of parts"
            )
    return checked


def _check_objects(values: object, where: str) -> list[dict[str, Plain]]:
    if not isinstance(values, list | tuple):
        raise RequestError(f"{where} is {type(values).__name__}, not a list of objects")
    checked = []
    for at, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise RequestError(f"{where}[{at}] is {type(value).__name__}, not an object")
        checked.append(_plain_object(value, f"{where}[{at}]"))
    return checked


def plain(value: object, where: str, depth: int = 0) -> Plain:
    """A copy in plain JSON types. A template comes from strangers: no method may reach it."""
    if depth > _MAX_DEPTH:
        raise RequestError(f"{where} is nested more than {_MAX_DEPTH} levels deep")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return _plain_object(value, where, depth)
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{at}]", depth + 1) for at, item in enumerate(value)]
    raise RequestError(f"{where} is {type(value).__name__}, which JSON has no form for")


def _plain_object(value: Mapping[Any, Any], where: str, depth: int = 0) -> dict[str, Plain]:
    return {str(key): plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}


def _with_reasoning_names(message: dict[str, Plain]) -> dict[str, Plain]:
    """Templates read a past answer's reasoning under one name or another; offer it under both."""
    reasoning = next(
        (message[name] for name in _REASONING_NAMES if message.get(name) is not None), None
    )
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
