"""Compilation of a kernel for sm_90 without a GPU: the text of every stage, and the resources it needs.

    source -> ttir -> ttgir -> llir -> ptx -> sass          and how long each step took

Triton's wheel brings its own ptxas and nvdisasm, so nothing else has to be installed. The facts are data
(`Compiled`); `lint` judges them, `explain` shows them, `build` does many at once and keeps the results. A process
that interprets kernels cannot compile them.
"""

import ast
import functools
import hashlib
import inspect
import os
import re
import subprocess
import tempfile
import textwrap
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cairn.core.errors import ConfigError
from cairn.kernels.kernel import Variant
from cairn.kernels.tooling import machine_code
from cairn.kernels.tooling.compiled import Compiled, Source

SCHEMA = 1  # of what is kept; another number is another compiler of ours
TARGET = GPUTarget("cuda", 90, 32)
PROJECT = Path(__file__).parents[3]


def compile_variant(variant: Variant, kernel: str = "") -> Compiled:
    """Never raises for what is wrong with the kernel: that is a finding."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ConfigError(
            "kernels are interpreted in this process, so they cannot be compiled in it",
            hint="unset TRITON_INTERPRET",
        )
    facts = Compiled(
        kernel=kernel,
        variant=variant.name,
        expect=variant.expect,
        allowed_spills=variant.allowed_spills,
        tools=tools(),
        sources=[source for source, _ in _parts(variant)],
    )
    try:
        built, log, stage_ms = _compile(variant)
    except Exception as problem:  # noqa: BLE001  the compiler raises what it likes
        return msgspec.structs.replace(facts, error=_reason(problem))
    return _facts(facts, built, log, stage_ms)


def fingerprint(variant: Variant) -> str:
    """Changes whenever the machine code could: source, helpers, types, constants, options, tools."""
    # Triton's own cache_key depends on the order in which modules were loaded.
    parts = (
        SCHEMA,
        tools(),
        [
            (_inside(source.path), source.first_line, source.text, used)
            for source, used in _parts(variant)
        ],
        sorted(variant.types.items()),
        sorted((name, repr(value)) for name, value in variant.constants.items()),
        sorted(variant.options.items()),
        sorted(variant.aligned),
        (variant.expect, variant.gluon, variant.name, variant.allowed_spills),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def _inside(path: str) -> str:
    """A file of this package by its place in it: two copies of the project make the same code."""
    return path.removeprefix(f"{PROJECT}/")


def tools() -> str:
    return f"triton {triton.__version__}, ptxas {knobs.nvidia.ptxas.version}"


def signature(variant: Variant) -> dict[str, str]:
    """The type of each argument, in order, as Triton wants to see it."""
    names = _function(variant).arg_names
    unknown = [name for name in (*variant.types, *variant.constants) if name not in names]
    missing = [n for n in names if n not in variant.types and n not in variant.constants]
    if unknown or missing:
        raise ConfigError(
            f"variant '{variant.name}' gives {', '.join(unknown) or 'nothing'} that its kernel does not take, "
            f"and leaves out {', '.join(missing) or 'nothing'}",
            hint=f"the arguments are: {', '.join(names)}",
        )
    return {n: "constexpr" if n in variant.constants else variant.types[n] for n in names}


def _compile(variant: Variant) -> tuple[Any, str, dict[str, float]]:
    """The compiled kernel with its texts in memory, ptxas' log, and milliseconds per stage."""
    function = _function(variant)
    types = signature(variant)
    places = [function.arg_names.index(name) for name in variant.aligned]
    attributes = {(place,): [["tt.divisibility", 16]] for place in places}
    kind: Any = ASTSource
    if variant.gluon:
        from triton.experimental.gluon._runtime import GluonASTSource

        kind = GluonASTSource
    source = kind(
        fn=function, signature=types, constexprs=dict(variant.constants), attrs=attributes
    )
    stage_ms: dict[str, float] = {}
    with _apart(stage_ms) as log:
        built = triton.compile(source, target=TARGET, options=dict(variant.options))
        texts = dict(built.asm)  # read now: the folder they are in goes away
    return (built.metadata, texts), log.getvalue(), stage_ms


@contextmanager
def _apart(stage_ms: dict[str, float]) -> Generator[StringIO]:
    """Compile anew, outside of Triton's own cache, with the clock and ptxas' log in our hands."""

    def note(times: Any, **_: Any) -> None:
        stage_ms["front end"] = times.ir_initialization / 1e3
        stage_ms.update({name: micros / 1e3 for name, micros in times.lowering_stages})

    log = StringIO()
    with (
        tempfile.TemporaryDirectory(prefix="cairn-compile-") as folder,
        knobs.cache.scope(),
        knobs.nvidia.scope(),
        knobs.compilation.scope(),
        redirect_stdout(log),  # where Triton prints that log
    ):
        knobs.cache.dir = folder
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.listener = note
        yield log


def _facts(facts: Compiled, built: Any, log: str, stage_ms: dict[str, float]) -> Compiled:
    metadata, texts = built
    resources = machine_code.read_log(log)
    sass = disassemble(texts["cubin"])
    threads = machine_code.threads(texts["ptx"])
    warps = threads // 32 if threads else metadata.num_warps
    counts = machine_code.opcodes(sass)
    stages = {name: texts[name] for name in ("ttir", "ttgir", "llir", "ptx") if name in texts}
    return msgspec.structs.replace(
        facts,
        registers=resources.registers,
        stack_bytes=resources.stack_bytes,
        spill_store_bytes=resources.spill_store_bytes,
        spill_load_bytes=resources.spill_load_bytes,
        shared_bytes=metadata.shared,
        warps=warps,
        occupancy=machine_code.occupancy(resources.registers, metadata.shared, warps),
        advisories=resources.advisories,
        opcodes=dict(counts.most_common()),
        mix=machine_code.mix(counts),
        multiplies=any(word in texts["ttgir"] for word in ("tt.dot ", "warp_group_dot ")),
        register_operand=machine_code.has_register_operand(sass),
        overwritten_barriers=machine_code.overwritten_barriers(texts["ptx"]),
        stage_ms=stage_ms,
        stages={
            "source": "\n".join(source.text for source in facts.sources),
            **stages,
            "sass": sass,
        },
    )


def disassemble(cubin: bytes) -> str:
    """SASS with the source line above the instructions that came from it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "-c", "-g", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"nvdisasm cannot read the machine code: {done.stderr.strip()[:200]}",
            hint="is TRITON_NVDISASM_PATH set to one of another CUDA version?",
        )
    return done.stdout


def _function(variant: Variant) -> Any:
    """The jitted function, below whatever autotuners and heuristics are around it."""
    function = variant.function
    while not hasattr(function, "cache_key"):
        function = function.fn
    return function


def _parts(variant: Variant) -> list[tuple[Source, list[str]]]:
    """The kernel, then the functions of ours that it calls: each once, with the constants it reads."""
    by_place: dict[tuple[str, int], tuple[Source, list[str]]] = {}
    waiting = [_function(variant)]
    while waiting:
        function = waiting.pop(0)
        source = _source(function.fn)
        place = (source.path, source.first_line)
        if place in by_place or source.path.startswith(os.path.dirname(triton.__file__)):
            continue
        by_place[place] = source, _constants(function)
        waiting.extend(_callees(function))
    return list(by_place.values())


def _callees(function: Any) -> Iterator[Any]:
    return (value for _, value in _mentioned(function) if hasattr(value, "fn"))


def _constants(function: Any) -> list[str]:
    """Compile-time constants of its module that the function reads."""
    names = {
        f"{name}={value!r}"
        for name, value in _mentioned(function)
        if isinstance(value, tl.constexpr | int | float | str | tl.dtype)
    }
    return sorted(names)


def _mentioned(function: Any) -> Iterator[tuple[str, Any]]:
    """Module values that the function's source refers to: `limit`, `tiles.limit`."""
    names: Mapping[str, Any] = function.fn.__globals__
    for name, attribute in _words(function.fn):
        if not attribute and name in names:
            yield name, names[name]
        elif attribute:
            module = names.get(name)
            if inspect.ismodule(module) and module not in (tl, triton):
                yield f"{name}.{attribute}", getattr(module, attribute, None)


# Text does not change while a process runs, and a hundred variants may share a function.
@functools.cache
def _source(function: Any) -> Source:
    lines, first = inspect.getsourcelines(function)
    return Source(inspect.getsourcefile(function) or "", first, textwrap.dedent("".join(lines)))


@functools.cache
def _words(function: Any) -> Sequence[tuple[str, str]]:
    """The names in its text, each once, with what follows a dot."""
    names: dict[tuple[str, str], None] = {}
    for node in ast.walk(ast.parse(_source(function).text)):
        if isinstance(node, ast.Name):
            names[node.id, ""] = None
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names[node.value.id, node.attr] = None
    return tuple(names)


def _reason(problem: Exception) -> str:
    """The line that says it: ptxas prints the reason first, the front end prints it last."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"\b(error|fatal) +:", line)]
    return f"{type(problem).__name__}: {(telling or lines[-1:] or [''])[0][:400]}"
