"""`cairn profile`: the ledger of a step, the table of kernels, a timeline for Perfetto. Measures nothing itself."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from cairn.bench.workload import WORKLOADS
from cairn.cli.profile import profile_train
from cairn.cli.subverbs import Subverb, dispatch
from cairn.core.config import load
from cairn.core.errors import UsageError, did_you_mean
from cairn.core.prose import in_terminal
from cairn.core.trace import make_place
from cairn.core.units import format_duration, format_rate
from cairn.report.progress import progress

if TYPE_CHECKING:
    from cairn.bench.profile_serve import Profile, StepProfile

ABOUT = "Where the time of a step goes, beside the least that it could take."
NAME_WIDTH = 47  # of a kernel; templates have names of hundreds of characters


class ProfileServe(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Serve a workload and show where the time of its steps went, which kernels ran, and how far from the limit.

    Prefill is every step in which some request computes more than one token. Times of parts come from a run without a
    profiler; kernels are counted in a few steps of a second run. On a CPU a tenth of the workload is served.
    """

    workload: str = "nano"
    """nano, latency, prefill, decode or shared; or as people have them: conversations, turns, agents, long,
    books, document, streams, brief, sampled or logprobs"""
    shape: str | None = None
    """a model with random weights: qwen3-0.6b, tiny, ...; by default one that suits the device"""
    model: str | None = None
    """a model with real weights, instead of a shape"""
    steps: int = 16
    """how many steps of each kind the kernels are counted in"""
    top: int = 15
    """how many kernels to print"""
    scale: float | None = None
    """make the workload smaller: 0.5 is half the requests with half the tokens each"""
    plain: bool = False
    """the plain forms of everything: no overlap, no graphs, no fused kernels"""
    device: str = "auto"
    """cpu, cuda, cuda:N; auto takes a GPU where there is one"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """type to compute in; auto keeps the type of the weights where the device is good at it"""
    quantization: str = ""
    """quantise the weights when the engine starts: fp8, w8a16, w4a16, nvfp4, or mxfp4 for experts"""
    kv_cache: Literal["", "fp8"] = ""
    """type of the keys and values: fp8 keeps one byte a number (on a GPU); default: the type of the model"""
    max_num_seqs: int = 256
    """most requests that run at once; with 1, as the latency workload has them, few graphs are captured"""
    out: Path | None = Path("runs/profile-serve.json")
    """where to write the timeline for https://ui.perfetto.dev; None: nowhere"""
    json: bool = False
    """print everything as one JSON document"""


def run(args: list[str]) -> int:
    return dispatch("profile", ABOUT, SUBVERBS, args)


def run_serve(args: list[str]) -> int:
    options = load(ProfileServe, args=args, env_prefix="CAIRN_PROFILE_SERVE_").value
    _check(options)
    make_place(options.out)
    # Before torch is imported, or its profiler says on stderr that it starts.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from cairn.bench.profile_serve import profile
    from cairn.bench.throughput import ThroughputSetup, default_shape, prepare

    shape = options.shape or default_shape(options.device)
    name, model = (
        (Path(options.model).name, options.model) if options.model else (shape, f"random:{shape}")
    )
    setup = ThroughputSetup(
        shape=name, model=model, device=options.device, dtype=options.dtype, plain=options.plain,
        scale=options.scale, repeats=1, workloads=[options.workload],
        quantization=options.quantization, kv_cache=options.kv_cache, max_num_seqs=options.max_num_seqs,
    )  # fmt: skip
    with progress(4, "starting") as advance:
        bench = prepare(setup)
        advance("started")
        found = profile(bench, options.workload, options.steps, options.out, advance)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return 0
    for note in bench.notes:
        print(in_terminal(note))
    ceiling = bench.ceiling
    rates = [f"{name} {format_rate(rate, 'FLOP')}" for name, rate in ceiling.flops_per_s.items()]
    print(", ".join([f"{ceiling.device}: copy {format_rate(ceiling.bytes_per_s, 'B')}", *rates]))
    print(text(found, options.top))
    return 0


def _check(options: ProfileServe) -> None:
    if options.model is not None and options.shape is not None:
        raise UsageError("both --model and --shape are given", hint="give one of them")
    if options.workload == "all":
        raise UsageError(
            "--workload all: a profile is of one workload",
            hint=f"name one of {', '.join(WORKLOADS)}",
        )
    if options.workload not in WORKLOADS:
        hint = did_you_mean(options.workload, WORKLOADS, f"there are: {', '.join(WORKLOADS)}")
        raise UsageError(f"there is no workload '{options.workload}'", hint=hint)
    for name in ("steps", "top", "max_num_seqs"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} is {getattr(options, name)}", hint="it is at least 1")
    if options.scale is not None and not 0 < options.scale <= 1:
        raise UsageError(f"--scale is {options.scale}", hint="it is above 0 and at most 1")


def text(found: "Profile", top: int) -> str:
    form = "overlapped" if found.overlapped else "plain"
    head = (
        f"\n{found.shape} {found.workload} {found.dtype}: {found.steps} steps in "
        f"{format_duration(found.seconds)}, {form} loop"
    )
    parts = [head, *found.notes]
    for ledger in found.ledgers:
        parts += ["", *_ledger_lines(ledger), "", *_kernel_lines(ledger, top)]
    if found.trace is not None:
        parts += [
            "",
            f"wrote {found.trace.out}: {found.trace.events} events; open it in https://ui.perfetto.dev",
        ]
    return "\n".join(parts)


def _ledger_lines(ledger: "StepProfile") -> list[str]:
    head = (
        f"{ledger.kind}: {ledger.steps} steps, in the median {ledger.sequences:g} sequences "
        f"and {ledger.tokens:g} tokens"
    )
    lines = [
        head,
        f"  {'part':<10}{'median':>12}{'p90':>12}{'of step':>9}{'floor':>12}{'above it':>12}",
    ]
    for part in ledger.parts:
        lines.append(
            f"  {part.part:<10}{_ms(part.median_ms):>12}{_ms(part.p90_ms):>12}{part.share:>9.1%}"
            f"{_ms(part.floor_ms):>12}{_ms(part.median_ms - part.floor_ms):>12}"
        )
    return lines


def _kernel_lines(ledger: "StepProfile", top: int) -> list[str]:
    if not ledger.kernels:
        return ["  no kernels were counted"]
    lines = [f"  {'kernel':<{NAME_WIDTH}}{'calls/step':>11}{'per step':>12}{'share':>8}"]
    for kernel in ledger.kernels[:top]:
        lines.append(
            f"  {kernel.name[: NAME_WIDTH - 2]:<{NAME_WIDTH}}{kernel.calls / ledger.window:>11.1f}"
            f"{_ms(kernel.total_ms / ledger.window):>12}{kernel.share:>8.1%}"
        )
    rest = ledger.kernels[top:]
    if rest:
        total = sum(kernel.total_ms for kernel in rest) / ledger.window
        share = sum(kernel.share for kernel in rest)
        lines.append(
            f"  {f'{len(rest)} others':<{NAME_WIDTH}}{'':>11}{_ms(total):>12}{share:>8.1%}"
        )
    return lines


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3f} ms"


SUBVERBS = {
    "serve": Subverb(
        run_serve, "the engine's steps on one workload, part by part and kernel by kernel"
    ),
    "train": Subverb(
        profile_train.run,
        "training steps, part by part and kernel by kernel, and their memory",
    ),
}
