"""Would a lab notice if the code were wrong? Plants one small fault in a function and takes it out again.

    mutants("cairn/cluster/reliability.py:young")  ──>  [Mutant(number=0, line="return ...", change="Mult -> Div"), ...]
    with planted("cairn/cluster/reliability.py:young", 0): lab.run(bench)      a check of the lab should be off

A mutant changes one operator, comparison, constant, sign, returned value or builtin (min and max) of the function's
source. The changed function replaces the original in its module or class, and in every module that imported it by
name. A forked process has the fault, too; a process that began before it gets it by `plant_again`. Runs no lab.
"""

import ast
import contextlib
import copy
import importlib
import inspect
import io
import sys
import textwrap
import tokenize
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
Fault = tuple[str, int]  # place and number
SWAPPED = {"min": "max", "max": "min", "sum": "max", "any": "all", "all": "any"}
standing: list[Fault] = []  # every fault that is planted in this process now
_until_exit = contextlib.ExitStack()


class Mutant(NamedTuple):
    number: int  # in this function as it stands now
    line: str  # the line of source where it is, without its comment: a function may grow around it
    change: str  # "Mult -> Div"


def mutants(place: str) -> list[Mutant]:
    """Every fault that can be planted in this function, in the order of its lines."""
    function = _found(place)[2]
    lines = _without_comments(textwrap.dedent(inspect.getsource(function)))
    return [
        Mutant(number, lines[at - 1].strip(), change)
        for number, (at, change, _) in enumerate(_changes(_parsed(function)))
    ]


def find_mutant(place: str, line: str, change: str, which: int = 0) -> Mutant | None:
    """The fault of this change in a line of this text, `which` of those that are alike; None when it is gone."""
    alike = [one for one in mutants(place) if (one.line, one.change) == (line, change)]
    return alike[which] if which < len(alike) else None


@contextlib.contextmanager
def planted(place: str, number: int) -> Generator[str]:
    """The function at `place` is wrong inside this block; yields what was changed."""
    owner, name, original = _found(place)
    what, changed = _mutated(original, number)
    before = owner.__dict__[name]
    put = type(before)(changed) if isinstance(before, (staticmethod, classmethod)) else changed
    places = [(owner, name), *_imported(original)]
    for where, attribute in places:
        setattr(where, attribute, put)
    standing.append((place, number))
    try:
        yield what
    finally:
        standing.remove((place, number))
        for where, attribute in places:
            setattr(where, attribute, before)


def plant_again(faults: list[Fault]) -> None:
    """Plants another process's faults here until this process ends; a fork has them already."""
    for place, number in faults:
        if (place, number) not in standing:
            _until_exit.enter_context(planted(place, number))


def _found(place: str) -> tuple[Any, str, Callable[..., Any]]:
    """Owner (module or class), name and plain function of "cairn/a/b.py:Class.method"."""
    path, _, dotted = place.partition(":")
    owner: Any = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    *classes, name = dotted.split(".")
    for one in classes:
        owner = getattr(owner, one)
    attribute = owner.__dict__[name]
    function = (
        attribute.fget if isinstance(attribute, property) else inspect.unwrap(getattr(owner, name))
    )
    if not inspect.isfunction(function) or isinstance(attribute, property):
        raise ValueError(f"{place} is no function that a fault can be planted in")
    return owner, name, function


def _without_comments(source: str) -> list[str]:
    """The lines of this source; a comment says nothing about where a fault is."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            at, column = token.start
            lines[at - 1] = lines[at - 1][:column]
    return lines


def _parsed(function: Callable[..., Any]) -> ast.Module:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    inner = tree.body[0]
    if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
        kept = [one for one in inner.decorator_list if _keeps_form(one)]
        inner.decorator_list = kept
    return tree


def _keeps_form(decorator: ast.expr) -> bool:
    """Decorators that the changed function has to have again; static and class methods are wrapped anew."""
    return not (isinstance(decorator, ast.Name) and decorator.id in ("staticmethod", "classmethod"))


def _mutated(function: Callable[..., Any], number: int) -> tuple[str, Callable[..., Any]]:
    _, what, change = list(_changes(_parsed(function)))[number]
    tree = _parsed(function)
    change(tree)
    ast.fix_missing_locations(tree)
    code = compile(tree, f"<fault in {function.__qualname__}>", "exec")
    scope: dict[str, Any] = {}
    exec(code, function.__globals__, scope)
    (mutant,) = scope.values()
    mutant.__qualname__, mutant.__module__ = function.__qualname__, function.__module__
    return what, mutant


def _imported(function: Callable[..., Any]) -> list[tuple[Any, str]]:
    """Modules of ours that know this very function by a name of their own."""
    return [
        (module, name)
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("cairn.")
        for name, value in list(vars(module).items())
        if value is function
    ]


Change = Callable[[ast.Module], None]


def _changes(tree: ast.Module) -> Iterator[tuple[int, str, Change]]:
    """Line, what can be changed there, and the change as a function over a fresh parse of the same source."""
    for at, node in enumerate(ast.walk(tree)):
        for what, edit in _edits(node):
            yield getattr(node, "lineno", 1), what, _at(at, edit)


def _at(at: int, edit: Callable[[Any], None]) -> Change:
    def change(tree: ast.Module) -> None:
        edit(list(ast.walk(tree))[at])

    return change


def _edits(node: ast.AST) -> Iterator[tuple[str, Callable[[Any], None]]]:
    match node:
        case ast.BinOp(op=op) if type(op) in BINARY:
            other = BINARY[type(op)]
            yield f"{type(op).__name__} -> {other.__name__}", _set("op", other())
        case ast.AugAssign(op=op) if type(op) in BINARY:
            other = BINARY[type(op)]
            yield f"{type(op).__name__} -> {other.__name__}", _set("op", other())
        case ast.Compare(ops=[op]) if type(op) in COMPARED:
            compared = COMPARED[type(op)]
            yield f"{type(op).__name__} -> {compared.__name__}", _set("ops", [compared()])
        case ast.Constant(value=bool() as value):
            yield f"{value} -> {not value}", _set("value", not value)
        case ast.Constant(value=int() | float() as number):
            yield f"{number} -> {number * 2 + 1}", _set("value", number * 2 + 1)
        case ast.Call(func=ast.Name(id=name)) if name in SWAPPED:
            yield f"{name} -> {SWAPPED[name]}", _set("func", ast.Name(SWAPPED[name], ast.Load()))
        case ast.UnaryOp(op=ast.USub()):
            yield "minus sign lost", _replace_with_operand
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "returned twice as large", _doubled


def _set(field: str, value: Any) -> Callable[[Any], None]:
    def edit(node: Any) -> None:
        setattr(node, field, copy.deepcopy(value))

    return edit


def _replace_with_operand(node: ast.UnaryOp) -> None:
    node.op = ast.UAdd()


def _doubled(node: ast.Return) -> None:
    assert node.value is not None
    node.value = ast.BinOp(node.value, ast.Mult(), ast.Constant(2))
