"""`cairn profile train`: the ledger of a training step, its kernels and its memory. Measures nothing itself."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from cairn.core.config import load
from cairn.core.trace import make_place
from cairn.core.units import format_bytes
from cairn.report.progress import progress

if TYPE_CHECKING:
    from cairn.bench.profile_train import TrainProfile

Positive = Annotated[int, msgspec.Meta(ge=1)]
NAME_WIDTH = 70


class ProfileTrain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Train on random tokens and show where the time of a step goes, which kernels ran, and what holds the memory.

    Parts are timed with the device idle between them, the whole step as it trains; kernels are counted in a few more.
    """

    model: str | None = None
    """a shape: qwen3-0.6b, tiny, ...; by default one that suits the device"""
    dtype: Literal["fp32", "bf16", "fp16", "fp8", "fp8-row"] | None = None
    """by default bf16, on a CPU fp32"""
    seq: Positive | None = None
    """tokens of a sequence; by default 4096, on a CPU 128"""
    batch: Positive = 8
    """sequences of a step"""
    microbatch: Positive | None = None
    recompute: Literal["auto", "none", "norms", "selective", "full"] = "auto"
    memory_gib: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """with recompute auto: what may be used of the device's memory; 0: nine tenths of it"""
    states: Literal["float32", "bfloat16", "int8"] = "float32"
    lora: Annotated[int, msgspec.Meta(ge=0)] = 0
    """rank of an adapter on all linear maps, which is trained in place of the weights; 0: none"""
    plain: bool = False
    """torch's own operations in place of our kernels"""
    steps: Positive = 5
    top: Positive = 20
    """how many kernels to print"""
    device: str = "auto"
    out: Path | None = Path("runs/profile-train.json")
    """where to write the timeline for https://ui.perfetto.dev; None: nowhere"""
    json: bool = False
    """print everything as one JSON document"""


def run(args: list[str]) -> int:
    options = load(ProfileTrain, args=args, env_prefix="CAIRN_PROFILE_TRAIN_").value
    # Before torch is imported, or its profiler says on stderr that it starts.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from cairn.bench.profile_train import profile
    from cairn.bench.train import TrainSetup, check, prepare
    from cairn.models.checkpoint import check_device, default_device
    from cairn.models.presets import preset

    device = default_device() if options.device == "auto" else options.device
    check_device(device)
    on_gpu = device != "cpu"
    setup = TrainSetup(
        model=options.model or ("qwen3-0.6b" if on_gpu else "tiny"),
        dtype=options.dtype or ("bf16" if on_gpu else "fp32"),
        seq=options.seq or (4096 if on_gpu else 128),
        batch=options.batch,
        microbatch=options.microbatch,
        recompute=options.recompute,
        memory_gib=options.memory_gib,
        states=options.states,
        lora=options.lora,
        plain=options.plain,
        device=device,
    )
    preset(setup.model)
    check(setup)
    make_place(options.out)
    with progress(5, "starting") as advance:
        bench = prepare(setup)
        advance("started")
        found = profile(bench, options.steps, options.out, advance)
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print(text(found, options.top))
    return 0


def text(found: "TrainProfile", top: int) -> str:
    trained = f", an adapter of rank {found.lora}," if found.lora else ""
    lines = [
        f"{found.model} {found.dtype}{trained} on {found.device}: "
        f"{found.step_ms:.2f} ms a step of {found.tokens:,} tokens, "
        f"floor {found.floor_ms:.2f} ms ({found.floor_ms / found.step_ms:.0%} of the step)",
        "",
        f"  {'part':<12}{'median':>12}{'share':>8}{'floor':>12}",
    ]
    for part in found.parts:
        lines.append(
            f"  {part.part:<12}{part.median_ms:>9.3f} ms{part.share:>8.1%}{part.floor_ms:>9.3f} ms"
        )
    lines += ["", f"  {'memory':<12}{'measured':>12}{'predicted':>12}"]
    for held in found.memory:
        measured = "" if held.measured is None else format_bytes(held.measured)
        lines.append(f"  {held.what:<12}{measured:>12}{format_bytes(held.predicted):>12}")
    lines += ["", f"  {'kernel':<{NAME_WIDTH}}{'calls/step':>11}{'per step':>12}{'share':>8}"]
    for kernel in found.kernels[:top]:
        lines.append(
            f"  {kernel.name[: NAME_WIDTH - 2]:<{NAME_WIDTH}}{kernel.calls / found.window:>11.1f}"
            f"{kernel.total_ms / found.window:>9.3f} ms{kernel.share:>8.1%}"
        )
    if rest := found.kernels[top:]:
        share = sum(kernel.share for kernel in rest)
        lines.append(f"  {f'{len(rest)} others':<{NAME_WIDTH}}{'':>23}{share:>8.1%}")
    if found.trace is not None:
        lines += ["", f"wrote {found.trace.out}: open it in https://ui.perfetto.dev"]
    return "\n".join(lines)
