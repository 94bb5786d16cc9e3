"""Builds a learner's C++ operator with torch.utils.cpp_extension and loads it into this process.

    file.cpp ──cpp_extension.load──> ninja and c++ ──> file.so ──> torch.ops.NAMESPACE_xxxx

Files use torch's stable headers (`torch/csrc/stable/`), which compile in seconds where `torch/extension.h` takes half a
minute. Several answers can be loaded at once: the namespace of each gets an ending of its own.
"""

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cairn.labs.exercises.grading import require

_LOADED: dict[str, Any] = {}


def operators(sources: Sequence[Path], namespace: str) -> Any:
    """The operators that the files register under `namespace`; a failed case that says why they do not compile."""
    import torch
    from torch.utils import cpp_extension

    require(
        shutil.which("ninja"),
        "cpp_extension needs ninja (apt install ninja-build)",
        "cpp_extension 需要 ninja（apt install ninja-build）",
    )
    text = b"".join(source.read_bytes() for source in sources)
    name = f"{namespace}_{hashlib.sha256(text).hexdigest()[:12]}"
    if name in _LOADED:
        return _LOADED[name]
    rename = f"-D{namespace}={name}"
    try:
        cpp_extension.load(
            name,
            [str(source) for source in sources],
            extra_cflags=["-O0", rename],
            build_directory=str(sources[0].parent),
            is_python_module=False,
        )
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if "error" in line.lower()]
        message = " ".join(lines[1:3] or lines)[:400]
        require(False, f"it does not compile: {message}", f"无法编译：{message}")
    _LOADED[name] = getattr(torch.ops, name)
    return _LOADED[name]
