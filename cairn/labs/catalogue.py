"""Which labs are there? One for each file of an area's folder; nothing is registered by hand.

Imports every lab file (they are small and leave torch for later) and refuses one whose name, area or shape is not
what its place says.
"""

import importlib
import importlib.util
import pkgutil
from functools import cache
from types import MappingProxyType

from cairn.core.errors import UsageError, did_you_mean
from cairn.labs.lab import AREAS, Lab


@cache
def all_labs() -> MappingProxyType[str, Lab]:
    """Every lab by name, area after area."""
    labs: dict[str, Lab] = {}
    for area in AREAS:
        package = importlib.import_module(f"cairn.labs.{area}")
        for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda one: one.name):
            if module.name.startswith("_"):
                continue  # shared by the labs of the area
            lab = _load(area, module.name)
            labs[lab.name] = lab
    return MappingProxyType(labs)


def labs_of(area: str) -> list[Lab]:
    if area not in AREAS:
        hint = did_you_mean(area, AREAS, otherwise=f"areas are: {', '.join(AREAS)}")
        raise UsageError(f"there is no area '{area}'", hint=hint)
    return [lab for lab in all_labs().values() if lab.area == area]


def find_lab(name: str) -> Lab:
    """One lab; only its own file is imported."""
    for area in AREAS:
        try:
            found = importlib.util.find_spec(f"cairn.labs.{area}.{name.replace('-', '_')}")
        except (ImportError, ValueError):  # a name that no module can have
            break
        if found is not None and not name.startswith("_") and "_" not in name:
            return _load(area, name.replace("-", "_"))
    labs = all_labs()
    if name not in labs:
        hint = did_you_mean(name, labs, otherwise="`cairn lab list` shows all of them")
        raise UsageError(f"there is no lab '{name}'", hint=hint)
    return labs[name]


def _load(area: str, module: str) -> Lab:
    lab = importlib.import_module(f"cairn.labs.{area}.{module}").LAB
    _require_place(lab, area, module)
    return lab


def _require_place(lab: Lab, area: str, module: str) -> None:
    expected = module.replace("_", "-")
    if (lab.name, lab.area) != (expected, area):
        raise ValueError(f"cairn/labs/{area}/{module}.py holds lab {lab.area}/{lab.name}")
