"""Where in this project is a named piece of code? "cairn/hw/roofline.py:floor" -> the file and the line.

Reads the source without importing it, so that a place can be shown on a machine that cannot run the code. Knows only
files of this package: the text of a lab or a topic never leads anywhere else.
"""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

import cairn

ROOT = Path(cairn.__file__).parent.parent  # of the checkout, or of site-packages


class Place(NamedTuple):
    path: str  # "cairn/hw/roofline.py"
    line: int
    name: str  # "floor", "Scheduler.step", or nothing for the whole file

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" + (f"  {self.name}" if self.name else "")


def find_place(written: str) -> Place:
    """The place of "file" or "file:name"; a ValueError says what is wrong with it."""
    path, _, name = written.partition(":")
    file = ROOT / path
    if not path.startswith("cairn/") or ".." in path or not file.exists():
        raise ValueError(f"{written}: there is no {path} in this project")
    if not name:
        return Place(path, 1, "")
    if file.suffix != ".py":
        raise ValueError(f"{written}: only a Python file has names")
    line = _line_of(_tree(file), name.split("."))
    if line is None:
        raise ValueError(f"{written}: {path} has no {name}")
    return Place(path, line, name)


@cache
def _tree(file: Path) -> ast.AST:
    return ast.parse(file.read_text())


def _line_of(tree: ast.AST, names: list[str]) -> int | None:
    """Functions, classes, their methods, and names assigned at the top."""
    for node in ast.iter_child_nodes(tree):
        if names[0] in _names_bound(node):
            if len(names) == 1:
                return getattr(node, "lineno", 1)
            return _line_of(node, names[1:])
    return None


def _names_bound(node: ast.AST) -> set[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Assign():
            return {target.id for target in node.targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()
