"""Sandbox for chat templates: they can read the given values and produce text, nothing else.

Templates are programs that arrive with a model from strangers. They run in Jinja's immutable sandbox with the
names that the Hugging Face ecosystem has agreed on (raise_exception, strftime_now, tojson, the generation tag):
no attribute that starts with an underscore, no change to what they are given, no import, no file. Each rendering has
a budget of steps, characters and seconds (`template_budget`). Jinja calls the sandbox for calls and operators; loops,
concatenation, slices, literals and set blocks are rewritten so that they call it as well.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from cairn.core.errors import TokenizerError
from cairn.models.template_budget import ITEM_CHARACTERS, Budget, Exhausted

MAX_SOURCE = 1 << 20  # characters of a template; the longest that models come with have 30,000
_MAX_EXPONENT = 64
_MAX_BITS = 1024  # of a number
_WIDEST_INDENT = 16
_NESTING = ("batch", "groupby", "slice")  # filters that put what they are given into lists
_BUDGET = "the budget"  # a variable that no template can name

# What Python raises when a template meets a conversation its author did not think of.
_PYTHON_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


class SandboxedTemplate:
    """A compiled template."""

    def __init__(self, source: str, owner: str, name: str = "default") -> None:
        self._title = f"the chat template of {owner}"
        if name != "default":
            self._title = f"the chat template {name!r} of {owner}"
        try:
            if len(source) > MAX_SOURCE:
                raise ValueError(f"it has {len(source)} characters, at most {MAX_SOURCE} are read")
            self._template = _Sandbox().from_string(source)
        except (TemplateSyntaxError, SyntaxError, ValueError, RecursionError) as error:
            line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise TokenizerError(
                f"{self._title} does not compile: {line}{error}",
                hint="compare chat_template with the model's original",
            ) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text; whatever goes wrong in the template is a TokenizerError with its message."""
        budget = Budget()
        try:
            return _bounded_join(self._template.generate({**variables, _BUDGET: budget}), budget)
        except Exhausted as error:
            raise TokenizerError(
                f"{self._title} does too much for this conversation: {error}",
                hint="shorten the conversation, or compare chat_template with the model's original",
            ) from error
        except TemplateError as error:
            raise self._refusal(error.message or type(error).__name__) from error
        except _PYTHON_ERRORS as error:
            raise self._refusal(f"{type(error).__name__}: {error}") from error

    def _refusal(self, why: str) -> TokenizerError:
        return TokenizerError(
            f"{self._title} refuses this conversation: {why}",
            hint="check the roles, their order and the form of content that this model expects",
        )


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks what the assistant wrote; for the text it is just a scope."""

    tags = {"generation"}  # noqa: RUF012  the form Jinja asks for

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Metered(NodeTransformer):
    """Rewrites what Jinja compiles to plain Python into filters of ours, which charge for it."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        step = _filtered(nodes.Const(True), "step()", node)
        if node.test is not None:  # it runs for each item, also for those that it leaves out
            node.test = nodes.And(step, node.test, lineno=node.lineno)
        else:
            node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "concat()", node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "made()", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = _filtered(node.filter, "made()", node)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return node if _is_constant(node) else _filtered(node, "nested()", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return node if _is_constant(node) else _filtered(node, "nested()", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        target = node.ctx != "load"
        return node if target or _is_constant(node) else _filtered(node, "nested()", node)


def _is_constant(node: nodes.Node) -> bool:
    plain = (nodes.Const, nodes.Pair)
    return all(isinstance(part, plain) and _is_constant(part) for part in node.iter_child_nodes())


def _filtered(value: nodes.Expr | None, name: str, at: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=at.lineno)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, where each operation is charged to the rendering that it is part of."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self.filters["tojson"] = to_json
        self.filters = {name: _charged(name, filter) for name, filter in self.filters.items()}
        self.filters |= {"step()": _step, "concat()": _concat, "made()": _made, "nested()": _nested}
        names: dict[str, Any] = self.globals
        names["raise_exception"] = _raise_exception
        names["strftime_now"] = _strftime_now
        names["dict"] = _Dict()
        names["namespace"] = _Namespace
        names["range"] = range
        del names["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Metered().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget: Budget = context.parent[_BUDGET]
        if type(left) is str and type(right) is str and operator == "+":  # as nearly all are
            budget.charge(len(left) + len(right))
            return left + right
        match operator:
            case "**":
                _check_power(left, right)
            case "*":
                budget.charge(_repeated(left, right) + _repeated(right, left))
            case "%" if isinstance(left, str):
                budget.foresee_format(left, right)
            case _:
                budget.charge(_shallow(left) + _shallow(right))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > _MAX_BITS:
            raise SecurityError(f"a number of more than {_MAX_BITS} bits")
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget: Budget = __context.parent[_BUDGET]
        if isinstance(__obj, BuiltinMethodType):
            if __obj.__name__ == "join" and args and isinstance(args[0], Iterable):
                args = (args[0] if isinstance(args[0], str | dict) else list(args[0]), *args[1:])
            budget.charge(_shallow(__obj.__self__))
            budget.foresee(__obj.__name__, __obj.__self__, args, kwargs)
        elif len(args) + len(kwargs) > 1:  # a macro or a class may put them into one value
            budget.size([*args, *kwargs.values()])
        result = super().call(__context, __obj, *args, **kwargs)
        budget.charge(_shallow(result), len(result) if isinstance(result, range) else 1)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        format = super().wrap_str_format(value)
        if format is None:
            return None

        @pass_context
        def charged(context: Context, *args: Any, **kwargs: Any) -> str:
            context.parent[_BUDGET].foresee_format(value.__self__, [*args, *kwargs.values()])
            return format(*args, **kwargs)

        return charged


def _charged(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's that charges for what it reads and returns."""

    @pass_context
    def charged(context: Context, value: Any = None, *args: Any, **kwargs: Any) -> Any:
        budget: Budget = context.parent[_BUDGET]
        if name == "join" and isinstance(value, Iterator):
            value = list(value)
        budget.charge(_shallow(value))
        if name == "format":
            budget.foresee_format(str(value), [*args, *kwargs.values()])
        budget.foresee(name, value, args, kwargs)
        result = filter(*_first(context, filter), value, *args, **kwargs)
        if name in _NESTING:
            groups = list(result)
            budget.size(groups)
            return iter(groups) if isinstance(result, Iterator) else groups
        budget.charge(_shallow(result))
        return result

    return charged


def _first(context: Context, filter: Callable[..., Any]) -> tuple[Any, ...]:
    """Leading arguments of a filter (context, eval context or environment)."""
    passed = getattr(filter, "jinja_pass_arg", None)
    arguments = {
        "context": context,
        "eval_context": context.eval_ctx,
        "environment": context.environment,
    }
    return () if passed is None else (arguments[passed.name],)


@pass_context
def _step(context: Context, value: Any) -> Any:
    """Charge one iteration of a loop to the budget."""
    context.parent[_BUDGET].charge()
    return value


@pass_context
def _concat(context: Context, values: list[Any]) -> str:
    """`a ~ b ~ c`"""
    budget: Budget = context.parent[_BUDGET]
    budget.charge(sum(map(budget.size, values)))
    return "".join(map(str, values))


@pass_context
def _made(context: Context, value: Any) -> Any:
    """A slice, or the text of a block."""
    context.parent[_BUDGET].charge(_shallow(value))
    return value


@pass_context
def _nested(context: Context, value: Any) -> Any:
    """A literal. [x, x] is as large as two of x: done again and again, it would soon be too large to print."""
    context.parent[_BUDGET].size(value)
    return value


def _shallow(value: object) -> int:
    """Size of a value in characters, without the content of its items."""
    if isinstance(value, list | tuple | dict):
        return ITEM_CHARACTERS * len(value)
    return len(value) if isinstance(value, str | bytes) else 0


def _repeated(value: object, times: object) -> int:
    """Text or a list, so many times over."""
    return _shallow(value) * max(0, times) if isinstance(times, int) else 0


def _check_power(base: object, exponent: object) -> None:
    if isinstance(exponent, int | float) and abs(exponent) > _MAX_EXPONENT:
        raise SecurityError(f"the exponent {exponent} is above {_MAX_EXPONENT}")


class _Dict:
    """`dict` for templates: a function, so that the class itself stays out of reach."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    @pass_context
    def fromkeys(self, context: Context, *args: Any) -> dict[Any, Any]:
        result = dict.fromkeys(*args)
        context.parent[_BUDGET].size(result)
        return result


class _Namespace(Namespace):
    """`namespace` for templates, without names that mean something to Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *positional = args
        attributes = dict(*positional, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<namespace>"  # not what is in it, which may be itself


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
    if isinstance(indent, int) and indent > _WIDEST_INDENT:
        raise SecurityError(f"tojson indents by {indent}, at most {_WIDEST_INDENT} is allowed")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _bounded_join(pieces: Iterable[str], budget: Budget) -> str:
    kept: list[str] = []
    size = 0
    for piece in pieces:
        kept.append(piece)
        size += len(piece)
        budget.check_text(size)
    return "".join(kept)
