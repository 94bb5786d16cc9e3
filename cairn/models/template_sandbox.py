"""What a chat template may do: read the values it is given, write text, and nothing else.

Templates are programs that arrive with a model from strangers. They run in Jinja's immutable sandbox with the
names that the Hugging Face ecosystem has agreed on (raise_exception, strftime_now, tojson, the generation tag):
no attribute that starts with an underscore, no change to what they are given, no import, no file. Loops over
`range`, repetition and the length of the text are bounded; a template that only burns time is not stopped.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from cairn.core.errors import TokenizerError

MAX_TEXT = 1 << 26  # characters: 64 MiB of prompt is beyond any context window
MAX_STEPS = 1_000_000  # items that one rendering may take from `range`
_MAX_EXPONENT = 64

# What Python raises when a template meets a conversation its author did not think of.
_PYTHON_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)  # fmt: skip


class Template:
    """One compiled template."""

    def __init__(self, source: str, owner: str) -> None:
        self._owner = owner
        try:
            self._template = _Sandbox().from_string(source)
        except (TemplateSyntaxError, SyntaxError, ValueError, RecursionError) as error:
            line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise TokenizerError(
                f"the chat template of {owner} does not compile: {line}{error}",
                hint="compare chat_template with the model's original",
            ) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text; whatever goes wrong in the template is a TokenizerError with its message."""
        try:
            return _bounded_join(self._template.generate({**variables, "range": _bounded_range()}))
        except TemplateError as error:
            raise self._refusal(error.message or type(error).__name__) from error
        except _PYTHON_ERRORS as error:
            raise self._refusal(f"{type(error).__name__}: {error}") from error

    def _refusal(self, why: str) -> TokenizerError:
        return TokenizerError(
            f"the chat template of {self._owner} refuses this conversation: {why}",
            hint="check the roles, their order and the form of content that this model expects",
        )


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks what the assistant wrote; for the text it is just a scope."""

    tags = {"generation"}  # noqa: RUF012  the form Jinja asks for

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, where repetition is bounded too."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self.filters["tojson"] = to_json
        names: dict[str, Any] = self.globals
        names["raise_exception"] = _raise_exception
        names["strftime_now"] = _strftime_now
        names["dict"] = _Dict()
        names["namespace"] = _Namespace

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int | float) and abs(right) > _MAX_EXPONENT:
            raise SecurityError(f"the exponent {right} is above {_MAX_EXPONENT}")
        if operator == "*":
            _refuse_to_repeat(left, right)
            _refuse_to_repeat(right, left)
        return super().call_binop(context, operator, left, right)


def _refuse_to_repeat(text: object, times: object) -> None:
    """Text or a list, so many times over, has to fit."""
    if (
        isinstance(text, str | list | tuple)
        and isinstance(times, int)
        and len(text) * times > MAX_TEXT
    ):
        raise SecurityError(f"{len(text)} characters or items times {times} is above {MAX_TEXT}")


class _Dict:
    """`dict` for templates: a function, so that the class itself stays out of reach."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` for templates, without names that mean something to Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args
        attributes = dict(*given, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: real characters, none of Jinja's escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _bounded_range() -> Callable[..., range]:
    """`range` for one rendering: nested loops share MAX_STEPS."""
    left = MAX_STEPS

    def bounded(*args: int) -> range:
        nonlocal left
        steps = range(*args)
        left -= len(steps)
        if left < 0:
            raise OverflowError(f"more than {MAX_STEPS} steps of range in one template")
        return steps

    return bounded


def _bounded_join(pieces: Any) -> str:
    kept: list[str] = []
    size = 0
    for piece in pieces:
        kept.append(piece)
        size += len(piece)
        if size > MAX_TEXT:
            raise OverflowError(f"the text is longer than {MAX_TEXT} characters")
    return "".join(kept)
