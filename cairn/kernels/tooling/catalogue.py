"""Catalogue of kernels: each file of `cairn/kernels/cases` describes one.

    VARIANTS, cases()    what is compiled, what is measured        KERNEL    the module that it is about

Found by reading the sources, so that listing names imports neither torch nor triton, and a new kernel needs no entry
anywhere. `load` imports one.
"""

import ast
import functools
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from cairn.core.errors import UsageError, did_you_mean

PACKAGE = "cairn.kernels"
HOME = Path(__file__).parents[1]
TOOLS = ("tooling", "interpreter", "cases")


class Entry(NamedTuple):
    module: str  # its variants and cases: "cairn.kernels.cases.rmsnorm"
    kernel: str  # "cairn.kernels.norm.rmsnorm"
    line: str  # the first sentence of the kernel's docstring
    tunable: bool  # has tuning()


@functools.cache
def kernels(home: Path = HOME) -> Mapping[str, Entry]:
    """Name of each kernel -> where it is and what it says about itself, in alphabetical order."""
    entries = {}
    for path in sorted((home / "cases").glob("*.py")):
        names = _defined(_parsed(path))
        if "KERNEL" in names:
            kernel = str(names["KERNEL"])
            source = home.joinpath(*kernel.split(".")[2:]).with_suffix(".py")
            line = (ast.get_docstring(_parsed(source)) or "").partition("\n")[0]
            module = f"{PACKAGE}.cases.{path.stem}"
            entries[path.stem] = Entry(module, kernel, line, "tuning" in names)
    return entries


def sources() -> list[Path]:
    """Every file of the package that may hold a kernel."""
    inside = [path for path in HOME.glob("*/*.py") if path.parent.name not in TOOLS]
    return sorted([*HOME.glob("*.py"), *inside])


def module_of(path: Path) -> str:
    return ".".join((PACKAGE, *path.relative_to(HOME).with_suffix("").parts))


def chosen(only: Sequence[str]) -> list[str]:
    """The kernels named, or all of them; a name that is not one is a usage error."""
    for name in only:
        if name not in kernels():
            hint = did_you_mean(name, kernels(), otherwise=f"there are: {', '.join(kernels())}")
            raise UsageError(f"there is no kernel '{name}'", hint=hint)
    return [name for name in kernels() if not only or name in only]


def load(name: str) -> ModuleType:
    [kernel] = chosen([name])
    return importlib.import_module(kernels()[kernel].module)


def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _defined(tree: ast.Module) -> dict[str, object]:
    """Names that the module defines at the top level; of constants their value."""
    names: dict[str, object] = {}
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name):
                names[name] = None
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                names[name] = value
    return names
