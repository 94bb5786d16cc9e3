"""A fingerprint of test files and of everything of ours that they import, directly or not.

Imports are read from the text, wherever they stand, so that a file counts that is imported only when it is needed.
Comments and docstrings do not count, nor does `cairn.core`: its errors, units and events compute nothing. Data that a
file reads while it runs does not count either, but for the tuned tables, which choose the kernels.
"""

import ast
import hashlib
import sys
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TABLES = ROOT / "cairn" / "kernels" / "tables"
LEFT_OUT = ROOT / "cairn" / "core"
TOOLS = ("torch", "triton", "numpy", "hypothesis")


def fingerprint(*paths: Path) -> str:
    found = hashlib.sha256()
    for tool in TOOLS:
        found.update(f"{tool} {version(tool)} ".encode())
    found.update(f"python {sys.version_info[:2]} ".encode())
    for table in sorted(TABLES.glob("*.json")):
        found.update(table.name.encode() + table.read_bytes())
    for source in sorted(set().union(*map(closure, paths))):
        found.update(source.relative_to(ROOT).as_posix().encode())
        found.update(_code(source).encode())
    return found.hexdigest()[:32]


def closure(path: Path) -> set[Path]:
    found, waiting = {path}, [path]
    while waiting:
        new = set(_imported(waiting.pop())) - found
        found |= new
        waiting += new
    return found


@cache
def _imported(path: Path) -> tuple[Path, ...]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    files = (file for name in _names(tree) for file in _files(name))
    return tuple(file for file in files if LEFT_OUT not in file.parents)


@cache
def _code(path: Path) -> str:
    """The statements alone: strings that stand for themselves are docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and _has_docstring(node):
            del node.body[0]
    return ast.dump(tree)


def _has_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> bool:
    return ast.get_docstring(node, clean=False) is not None


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _files(name: str) -> Iterator[Path]:
    """Of this module, if it is ours; the packages around it are imported, too."""
    parts = name.split(".")
    if parts[0] == "cairn":
        for end in range(1, len(parts) + 1):
            at = ROOT.joinpath(*parts[:end])
            yield from (
                file for file in (at.with_suffix(".py"), at / "__init__.py") if file.is_file()
            )
    else:
        places = (folder / f"{parts[0]}.py" for folder in (FOLDER, FOLDER.parent))
        yield from (file for file in places if file.is_file())
