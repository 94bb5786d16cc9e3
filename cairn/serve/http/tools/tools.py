"""Tools of a request and the constraints on its answer.

    tools, tool_choice -read_tools-> ToolPlan -tool_guide-> a grammar, where a call is demanded ("required", or by name)

How tools are shown to the model is the chat template's business, and how calls are found in an answer `tool_parser`'s.
With "auto" the model decides, unguided. With "none" the tools are not shown, and nothing is parsed.
"""

import re
import secrets
import string
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from cairn.core.errors import RequestError, did_you_mean
from cairn.models.chat_template import ChatTemplates
from cairn.models.tokenizer import Tokenizer
from cairn.serve.grammar import json_rule
from cairn.serve.http.tools.tool_parser import CLOSE, OPEN, PYTHON_TAG, TOOL_CALLS, ToolFormat
from cairn.serve.json_schema import check_depth, closed_objects
from cairn.serve.structured_output import Guide, lark_guide, literal

Choice = Literal["none", "auto", "required"]
CHOICES = ("none", "auto", "required")
MOST_TOOLS = 512
# Calls in an answer that has to call, where the client asks for several: small models would make up more of them.
MOST_DEMANDED = 4
GENERIC: ToolFormat = "hermes"  # for templates that show no tools
NOT_JSON = (
    "<function=",
    "<arg_key>",
    "<invoke name=",
)  # marks of calls that are no JSON, in templates
CHANNEL = "<|channel|>"  # of Harmony
HARMONY_MARKS = ("channel", "constrain", "message")
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_LETTERS = string.ascii_letters + string.digits


class ToolPlan(msgspec.Struct, frozen=True):
    parameters: dict[str, Mapping[str, Any]]  # a schema for each name
    choice: Choice
    only: str | None = None  # the one that has to be called
    parallel: bool = True  # more than one call in an answer
    demanded: int = 1  # calls at most where one is demanded

    @property
    def shown(self) -> bool:
        """Are the tools shown to the model, and calls looked for in its answer?"""
        return bool(self.parameters) and self.choice != "none"

    @property
    def allowed(self) -> dict[str, Mapping[str, Any]]:
        return self.parameters if self.only is None else {self.only: self.parameters[self.only]}


def read_tools(tools: object, tool_choice: object = None, parallel: bool | None = None) -> ToolPlan:
    """OpenAI's fields. RequestError names what is wrong with them."""
    parameters: dict[str, Mapping[str, Any]] = {}
    if tools is not None and not isinstance(tools, list | tuple):
        raise RequestError(f"tools is {type(tools).__name__}", hint="it has to be a list")
    if tools and len(tools) > MOST_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries", hint=f"it can have {MOST_TOOLS}")
    for at, tool in enumerate(tools or ()):
        name, schema = _function(tool, f"tools[{at}]")
        if name in parameters:
            raise RequestError(f"tools[{at}].function.name is {name!r} again")
        parameters[name] = schema
    choice, only = _choice(tool_choice, parameters)
    demanded = MOST_DEMANDED if parallel else 1
    return ToolPlan(parameters, choice, only, parallel is not False, demanded)


def allowed_tools(tools: list[Any] | None, tool_choice: object) -> tuple[list[Any] | None, object]:
    """OpenAI's tool_choice `allowed_tools`: these of the tools, and what is demanded of them.

    The others are not shown to the model either, which could call them otherwise.
    """
    if not isinstance(tool_choice, Mapping) or tool_choice.get("type") != "allowed_tools":
        return tools, tool_choice
    inner = tool_choice.get("allowed_tools", tool_choice)  # /v1/responses has no object within
    mode, entries = (
        inner.get(key) if isinstance(inner, Mapping) else None for key in ("mode", "tools")
    )
    if mode not in ("auto", "required") or not isinstance(entries, list):
        raise RequestError(
            "tool_choice of the type allowed_tools has no mode or no tools",
            hint='it has to be {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}, '
            "and the mode auto or required",
        )
    allowed = [_choice(entry, _names(tools))[1] for entry in entries]
    return [tool for tool in tools or () if set(_names([tool])) & set(allowed)], mode


def _names(tools: object) -> dict[str, Mapping[str, Any]]:
    return read_tools(tools).parameters


def tool_guide(plan: ToolPlan, format: ToolFormat, tokenizer: Tokenizer) -> Guide | None:
    """The grammar of an answer that is nothing but calls; None: none is demanded."""
    if plan.choice != "required":
        return None
    if format == "harmony":
        return _message_to_tool(plan, tokenizer)
    names = list(plan.allowed)
    key = "parameters" if format == "llama3" else "arguments"
    begins = mark(OPEN, tokenizer) + r' "\n"' if format == "hermes" else ""
    ends = r'"\n" ' + mark(CLOSE, tokenizer) if format == "hermes" else ""
    between = {"mistral": '", "', "llama3": '"; "'}.get(format, r'"\n"')
    more = f"({between} call){{0,{plan.demanded - 1}}}" if plan.demanded > 1 else ""
    calls = f"call {more}"
    if format == "mistral":
        calls = f'{mark(TOOL_CALLS, tokenizer)} "[" {calls} "]"'
    any_of_them = " | ".join(f"call_{i}" for i in range(len(names)))
    rules = [f"start: {calls}", f"call: {begins} ({any_of_them}) {ends}"]
    for i, name in enumerate(names):
        opening = f'{{"name": {literal(name)}, "{key}": '
        rules.append(f'call_{i}: {literal(opening)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: {json_rule(closed_objects(plan.allowed[name]))}")
    return lark_guide("\n".join(rules), "tools")


def _message_to_tool(plan: ToolPlan, tokenizer: Tokenizer) -> Guide:
    """Harmony grammar of a final message to a tool."""
    channel, json, message = (mark(f"<|{name}|>", tokenizer) for name in HARMONY_MARKS)
    rules = ["start: " + " | ".join(f"call_{i}" for i in range(len(plan.allowed)))]
    for i, (name, schema) in enumerate(plan.allowed.items()):
        header = literal(f"commentary to=functions.{name} ")
        rules.append(f'call_{i}: {channel} {header} {json} "json" {message} arguments_{i}')
        rules.append(f"arguments_{i}: {json_rule(closed_objects(schema))}")
    return lark_guide("\n".join(rules), "tools")


def mark(text: str, tokenizer: Tokenizer) -> str:
    """Lark terminal for a special token, or for its text if the vocabulary has no such token."""
    id = tokenizer.backend.token_to_id(text)
    return literal(text) if id is None else f"<[{id}]>"


def hides_marks(format: ToolFormat, tokenizer: Tokenizer) -> bool:
    """Would text without special tokens lack the marks? Then a request has to be decoded with them."""
    if format == "json":  # it needs none
        return False
    marks = {"hermes": OPEN, "llama3": PYTHON_TAG, "mistral": TOOL_CALLS, "harmony": CHANNEL}
    return tokenizer.backend.token_to_id(marks[format]) in tokenizer.special_ids


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template teaches; None: it knows no tools, or in a way that is not known here."""
    if CHANNEL in template:
        return "harmony"
    if TOOL_CALLS in template:
        return "mistral"
    if any(mark in template for mark in NOT_JSON):  # also where they stand inside of <tool_call>
        return None
    if OPEN in template:
        return "hermes"
    if PYTHON_TAG in template or ('"parameters"' in template and "<|start_header_id|>" in template):
        return "llama3"
    return None


def format_for(templates: ChatTemplates) -> ToolFormat:
    """The format in which calls are demanded of a model and found in its answers."""
    taught = format_of(templates.sources[templates.choose(with_tools=True)])
    return taught or ("json" if templates.tool_support.offered else GENERIC)


def note_on_tools(templates: ChatTemplates) -> str:
    """Startup note about the tool-call format."""
    format = format_for(templates)
    if format == "json":
        return (
            "tool calls: the chat template shows tools in a form whose calls are not read yet; found are JSON calls of "
            "offered tools, and a demanded call (tool_choice) is such JSON"
        )
    taught = format_of(templates.sources[templates.choose(with_tools=True)]) is not None
    return f"tool calls: {format}{'' if taught else ', described in the system message'}"


def new_call_id(format: ToolFormat) -> str:
    """Mistral's templates refuse ids that are not of nine letters and digits."""
    letters = "".join(secrets.choice(_LETTERS) for _ in range(9 if format == "mistral" else 24))
    return letters if format == "mistral" else f"call_{letters}"


def _function(tool: object, where: str) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} is {type(tool).__name__}", hint="it has to be an object")
    if tool.get("type", "function") != "function":
        raise RequestError(f"{where}.type is {tool['type']!r}", hint="it has to be function")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function is missing, or no object")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name is {str(name)[:80]!r}",
            hint="it has to be 1 to 128 letters, digits, _, - and .",
        )
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping):
        raise RequestError(f"{where}.function.parameters is no object", hint="it is a JSON schema")
    check_depth(parameters, f"{where}.function.parameters")
    return name, parameters


def _choice(value: object, parameters: Mapping[str, object]) -> tuple[Choice, str | None]:
    if value is None:
        return ("auto", None) if parameters else ("none", None)
    if value == "none":
        return "none", None
    if isinstance(value, str) and value not in CHOICES:
        hint = did_you_mean(value, CHOICES, otherwise=f"it has to be {', '.join(CHOICES)}")
        raise RequestError(f"tool_choice is {value[:80]!r}", hint=hint)
    if value == "auto":  # frameworks send it with an empty list
        return ("auto" if parameters else "none"), None
    if not parameters:
        raise RequestError("tool_choice asks for a tool, and there are none", hint="send tools")
    if value == "required":
        return "required", None
    function = value.get("function", value) if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            "tool_choice names no tool",
            hint='it has to be none, auto, required or {"type": "function", "function": {"name": ...}}',
        )
    if name not in parameters:
        hint = did_you_mean(name, parameters, otherwise=f"there are: {', '.join(parameters)}")
        raise RequestError(f"tool_choice names {name[:80]!r}, which is not in tools", hint=hint)
    return "required", name
