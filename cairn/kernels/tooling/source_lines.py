"""Mapping from lines of a compiler stage to source lines.

Every stage notes it in its own way: MLIR with loc(...), LLVM IR with !dbg, PTX with .loc, SASS with a comment. Each
reader here takes the text of one stage and yields its lines without those notes, with the places they came from,
innermost call first. Pure functions over text.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

Place = tuple[str, int]  # path, line
Line = tuple[str, Sequence[Place]]

_MLIR_PLACE = re.compile(r'"([^"]+)":(\d+):\d+')
_MLIR_DEFINITION = re.compile(r"^#loc(\d*) = loc\((.*)\)$")
_MLIR_USE = re.compile(r" loc\((#loc\d*|\"[^\"]*\":\d+:\d+|unknown)\)")
_LLVM_NODE = re.compile(r"^(!\d+) = (?:distinct )?!(DI\w+)\((.*)\)$")
_LLVM_FIELD = re.compile(r'(\w+): (!\d+|"[^"]*"|\d+)')
_LLVM_USE = re.compile(r",? !dbg (!\d+)")
_PTX_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_PTX_PLACE = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+\d+(?:.*inlined_at\s+(\d+)\s+(\d+))?")
_SASS_NOTE = re.compile(r'//## File "([^"]+)", line (\d+)(?: inlined at "([^"]+)", line (\d+))?')


def mlir(text: str) -> Iterator[Line]:
    definitions: dict[str, str] = {}
    for line in text.splitlines():
        if match := _MLIR_DEFINITION.match(line):
            definitions[f"#loc{match[1]}"] = match[2]
    for line in text.splitlines():
        if line.startswith("#loc"):
            continue
        used = _MLIR_USE.findall(line)
        yield _MLIR_USE.sub("", line), _mlir_places(used[-1], definitions) if used else ()


def _mlir_places(location: str, definitions: Mapping[str, str], depth: int = 0) -> list[Place]:
    """A name or a call site refers to further locations, the called one first."""
    if depth > 32:
        return []
    if direct := _MLIR_PLACE.match(location):
        return [(direct[1], int(direct[2]))]
    places: list[Place] = []
    for reference in re.findall(r"#loc\d*", location):
        text = definitions.get(reference, "unknown")
        places += _mlir_places(text, definitions, depth + 1)
    return places


def llvm(text: str) -> Iterator[Line]:
    nodes: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        if match := _LLVM_NODE.match(line):
            fields = {name: value.strip('"') for name, value in _LLVM_FIELD.findall(match[3])}
            nodes[match[1]] = fields
    for line in text.splitlines():
        if line.startswith("!"):
            continue
        used = _LLVM_USE.search(line)
        yield _LLVM_USE.sub("", line), list(_llvm_places(used[1], nodes)) if used else ()


def _llvm_places(node: str, nodes: Mapping[str, Mapping[str, str]]) -> Iterator[Place]:
    for _ in range(32):
        location = nodes.get(node, {})
        if "line" not in location:
            return
        file = nodes.get(nodes.get(location.get("scope", ""), {}).get("file", ""), {})
        yield f"{file.get('directory', '')}/{file.get('filename', '')}", int(location["line"])
        node = location.get("inlinedAt", "")


def ptx(text: str) -> Iterator[Line]:
    files: dict[str, str] = {}
    for line in text.splitlines():
        if match := _PTX_FILE.match(line):
            files[match[1]] = f"{match[2]}/{match[3]}" if match[3] else match[2]
    places: list[Place] = []
    for line in text.splitlines():
        if ".debug_" in line and ".section" in line:
            return  # tables for debuggers fill the rest
        if match := _PTX_PLACE.match(line):
            places = [(files.get(match[1], ""), int(match[2]))]
            if match[3]:
                places.append((files.get(match[3], ""), int(match[4])))
        else:
            is_instruction = line.startswith("\t") and not line.lstrip().startswith((".", "//"))
            yield line, places if is_instruction else ()


def sass(text: str) -> Iterator[Line]:
    places: list[Place] = []
    is_new = True  # notes of nested calls follow one another
    for line in text.splitlines():
        if match := _SASS_NOTE.search(line):
            places = [] if is_new else places
            places.append((match[1], int(match[2])))
            if match[3]:
                places.append((match[3], int(match[4])))
            is_new = False
        elif line.lstrip().startswith("/*"):
            is_new = True
            yield " ".join(line.split()), places
        elif line.lstrip().startswith(".L_") or line.startswith(".text"):
            yield line.lstrip(), ()


READERS: Mapping[str, Callable[[str], Iterator[Line]]] = {
    "ttir": mlir,
    "ttgir": mlir,
    "llir": llvm,
    "ptx": ptx,
    "sass": sass,
}
