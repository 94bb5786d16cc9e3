"""A fingerprint of test files and of everything of ours that they import, directly or not.

Imports are read from the text, wherever they stand, so that a file counts that is imported only when it is needed.
Data that a file reads while it runs does not count, but for the tuned tables, which choose the kernels.
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
TOOLS = ("torch", "triton", "numpy", "hypothesis")


def fingerprint(*paths: Path) -> str:
    found = hashlib.sha256()
    for tool in TOOLS:
        found.update(f"{tool} {version(tool)} ".encode())
    found.update(f"python {sys.version_info[:2]} ".encode())
    parts = set(TABLES.glob("*.json")).union(*map(closure, paths))
    for part in sorted(parts):
        found.update(part.relative_to(ROOT).as_posix().encode())
        found.update(part.read_bytes())
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
    return tuple(file for name in _names(tree) for file in _files(name))


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
