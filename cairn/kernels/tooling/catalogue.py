"""Which kernels are there? Every module of `cairn.kernels` that has both VARIANTS and cases().

Found by reading the sources, so that listing names imports neither torch nor triton, and a new kernel file needs no
entry anywhere. `load` imports one.
"""

import ast
import functools
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from cairn.core.errors import UsageError, did_you_mean

MARKS = {"VARIANTS", "cases"}
PACKAGE = "cairn.kernels"
TOOLS = ("tooling", "interpreter")


class Entry(NamedTuple):
    module: str  # "cairn.kernels.norm.rmsnorm"
    line: str  # the first sentence of its docstring
    tunable: bool  # has tuning()


@functools.cache
def kernels(folder: Path = Path(__file__).parents[1]) -> Mapping[str, Entry]:
    """Name of each kernel -> where it is and what it says about itself, in alphabetical order."""
    found = {}
    for path in sources(folder):
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        names = _defined(tree)
        if names >= MARKS:
            line = (ast.get_docstring(tree) or "").partition("\n")[0]
            found[path.stem] = Entry(module_of(path, folder), line, "tuning" in names)
    return found


def sources(folder: Path = Path(__file__).parents[1]) -> list[Path]:
    """Every file of the package that may hold a kernel, in the order of names; the tools are none."""
    inside = [path for path in folder.glob("*/*.py") if path.parent.name not in TOOLS]
    return sorted([*folder.glob("*.py"), *inside], key=lambda path: path.stem)


def module_of(path: Path, folder: Path = Path(__file__).parents[1]) -> str:
    return ".".join((PACKAGE, *path.relative_to(folder).with_suffix("").parts))


def chosen(only: Sequence[str]) -> list[str]:
    """The kernels named, or all of them; a name that is not one is a usage error."""
    for name in only:
        if name not in kernels():
            hint = did_you_mean(name, kernels(), otherwise=f"there are: {', '.join(kernels())}")
            raise UsageError(f"there is no kernel '{name}'", hint=hint)
    return [name for name in kernels() if not only or name in only]


def load(name: str) -> ModuleType:
    [known] = chosen([name])
    return importlib.import_module(kernels()[known].module)


def _defined(tree: ast.Module) -> set[str]:
    """Names that the module gives to something of its own, at the top level."""
    names: set[str] = set()
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name):
                names.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Assign(targets=targets):
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names
