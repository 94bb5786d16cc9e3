"""Description of a kernel: cost, compiled variants and benchmark cases.

A kernel file holds one operation: the reference in a few lines of float32 torch, the kernel below it, and its cost.
The file of the same name in `kernels/cases` says what is compiled and measured:

    cost(...)  -> Cost            FLOPs and bytes that the operation cannot avoid
    VARIANTS   : list[Variant]    every configuration that ships; compiled and linted without a GPU
    cases()    -> Iterator[Case]  shapes to measure on a GPU, each beside an anchor
    tuned_variants() -> Iterator[Variant]    where tables of configurations ship: how each of those is compiled

The compiler tools, the bench, the profiler and the tests read these; nothing is registered anywhere else. This
module imports neither torch nor triton.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

# Which tensor-core instructions the machine code must have.
Expect = Literal["wgmma", "mma", "none"]


class Cost(NamedTuple):
    """Minimum cost of any implementation: each input is read once, each output written once."""

    flops: float
    bytes: float


class Variant(NamedTuple):
    """A specialisation of a kernel that can be compiled without tensors or a GPU."""

    name: str  # "rmsnorm 4096 bf16"
    function: Any  # the @triton.jit or @gluon.jit function
    types: Mapping[str, str]  # of the run-time arguments: {"x": "*bf16", "rows": "i32"}
    constants: Mapping[str, Any]  # of the compile-time ones
    options: Mapping[str, int] = {}  # num_warps, num_stages, maxnreg
    aligned: Sequence[str] = ()  # arguments that are multiples of 16, as torch's tensors are
    expect: Expect = "none"
    gluon: bool = False
    # Bytes that may be spilled, where that was measured to be faster than not.
    allowed_spills: int = 0


class Prepared(NamedTuple):
    """A measurement that is ready to run: every call works on the same inputs."""

    ours: Callable[[], object]
    anchors: Mapping[str, Callable[[], object]]  # "cuDNN", "torch.compile": the bar in the same run
    error: Callable[[], float]  # relative, of a fresh result against a float64 or float32 oracle


class Case(NamedTuple):
    """A benchmark case: a kernel, a shape, and its minimum cost."""

    kernel: str
    shape: str  # "16384 x 4096"
    dtype: str  # "bf16"; whose matmul ceiling applies
    cost: Cost
    prepare: Callable[[], Prepared]  # allocates on the current CUDA device
    tolerance: float = 1e-2
    graph: bool = False  # short: measure replays of a CUDA graph, or the launch is what is measured
