"""Every name that the code takes from torch exists there: code for a GPU is read here, although it cannot run here."""

import ast
from pathlib import Path

import torch

PACKAGE = Path(__file__).parent.parent / "cairn"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "import torch" in path.read_text())


def chain(node: ast.AST) -> list[str]:
    """["torch", "cuda", "synchronize"] of torch.cuda.synchronize; empty where the root is not a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def missing(source: str) -> list[str]:
    """The dotted names of torch in this source that the installed torch does not have."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = chain(node)
        if (
            len(names) < 2 or names[0] != "torch" or names[1] == "ops"
        ):  # operators are registered while the code runs
            continue
        if names[1] == "_C" and names[-1].startswith("_cuda"):  # where torch was built for CUDA
            continue
        value: object = torch
        for name in names[1:]:
            if isinstance(value, type) or not hasattr(value, name):
                break
            value = getattr(value, name)
        else:
            continue
        if not isinstance(value, type):
            found.add(".".join(names))
    return sorted(found)


def test_torch_has_every_name_that_is_used() -> None:
    faults = {
        str(path.relative_to(PACKAGE)): names
        for path in FILES
        if (names := missing(path.read_text()))
    }
    assert not faults


def test_a_misspelt_name_is_found() -> None:
    assert missing("import torch\ntorch.cuda.getdevice_name(0)") == ["torch.cuda.getdevice_name"]
