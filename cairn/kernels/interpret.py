"""Triton's CPU interpreter, made fit for checking kernels without a GPU.

    import cairn.kernels.interpret            before any kernel module, in a process of its own

Triton 3.6's interpreter computes bfloat16 and 8-bit floats on their bit patterns, cannot loop under NumPy 2.4, ends
the process on a bad pointer and ignores `device_assert`. `cairn.kernels.interpreter` mends each such thing, and says
why; importing this module applies all of it. What no interpreter shows stays hidden: races, layouts, shared memory,
asynchronous copies. Gluon kernels are not interpreted.

Interpreting changes `triton.language` for good, so a process that interprets does not compile.
"""

import functools
import os
import sys

from cairn.core.errors import ConfigError

HINT = "import cairn.kernels.interpret before any kernel, or start with TRITON_INTERPRET=1"

if "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"
elif os.environ.get("TRITON_INTERPRET") != "1":
    raise ConfigError("triton was imported before cairn.kernels.interpret", hint=HINT)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from cairn.kernels.interpreter import arithmetic, language, memory, reductions  # noqa: E402
from cairn.kernels.interpreter.language import ASSEMBLY  # noqa: E402
from cairn.kernels.interpreter.memory import OutOfBounds, reachable  # noqa: E402

__all__ = ["ASSEMBLY", "FIXES", "OutOfBounds", "install", "reachable"]

FIXES = (*arithmetic.FIXES, *reductions.FIXES, *memory.FIXES, *language.FIXES)


@functools.cache
def install() -> None:
    """Apply every fix, once."""
    if not isinstance(tl.standard.sum, InterpretedFunction):
        raise ConfigError("TRITON_INTERPRET was set after triton had been imported", hint=HINT)
    if not triton.__version__.startswith("3.6."):
        raise ConfigError(
            f"the fix-ups are for the interpreter of Triton 3.6, not of {triton.__version__}",
            hint="install triton==3.6.0, or look through cairn/kernels/interpreter",
        )
    for fix in FIXES:
        fix()


install()
