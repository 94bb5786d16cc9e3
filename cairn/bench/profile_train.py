"""Profile of a training step: time and memory of each part.

    whole steps, as they train                             -> the time of a step, beside its floor
    steps with the device idle between their parts         -> the ledger: forward, backward, norm, update
    a few steps under torch's profiler                     -> the table of kernels (operations, on a CPU)
    tensors by what they are for                           -> memory, measured beside predicted
    spans of the host, kernels of the device               -> one timeline for Perfetto

The floor of forward and backward is their FLOPs at the measured matmul rate (frozen weights have no gradients); of the
update, the bytes of trained weights, gradients and states at the measured copy rate. Prints nothing.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch
from torch import Tensor

from cairn.bench.limit import measure_ceiling
from cairn.bench.profiled_kernels import KernelLine, ProfileWindow, device_spans, profiled_calls
from cairn.bench.train import TrainBench, frozen_values
from cairn.core import events
from cairn.core.trace import TraceSummary, write_trace
from cairn.kernels.tooling.measure import Ceiling
from cairn.models.linear.maps import Vocabulary
from cairn.train.data.batch import Batch
from cairn.train.flops import step_flops
from cairn.train.memory import predict
from cairn.train.objective import valid_tokens
from cairn.train.step import clip_factor, train_step

Ran = Callable[[str], None]
PARTS = ("forward", "backward", "norm", "update")


class TrainStepPart(msgspec.Struct, frozen=True, kw_only=True):
    part: str
    median_ms: float
    share: float  # of the sum of the parts
    floor_ms: float


class HeldMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one kind of tensor."""

    what: str
    measured: int | None  # None: this device cannot tell
    predicted: int


class TrainProfile(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    dtype: str
    lora: int  # rank of the adapter that is trained; 0: all weights are
    device: str
    tokens: int  # of a step
    step_ms: float  # median, nothing between the parts
    floor_ms: float
    parts: list[TrainStepPart]
    window: int  # steps that the kernels were counted in
    kernels: list[KernelLine]
    memory: list[HeldMemory]
    trace: TraceSummary | None = None


def profile(
    bench: TrainBench, steps: int, out: Path | None, ran: Ran = lambda what: None
) -> TrainProfile:
    device = torch.device(bench.device)
    for _ in range(2):
        train_step(bench.state, bench.batches)
    ran("warm-up")
    unit = "fp32" if bench.setup.dtype == "fp32" else "bf16"
    ceiling = measure_ceiling(bench.device, unit)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with _recorded(out) as recorded:
        whole = [
            _seconds(device, lambda: train_step(bench.state, bench.batches)) for _ in range(steps)
        ]
        memory = _memory(bench)
        ran("steps")
        parts = [_parts(bench, device) for _ in range(steps)]
        ran("ledger")
        call = lambda: train_step(bench.state, bench.batches)  # noqa: E731
        window = profiled_calls(call, device, min(steps, 3))
        ran("kernels")
        events.close()
        summary = recorded(window)
    floors = _floors(bench, ceiling, unit)
    medians = {name: statistics.median(one[name] for one in parts) for name in PARTS}
    total = sum(medians.values())
    return TrainProfile(
        model=bench.setup.model,
        dtype=bench.setup.dtype,
        lora=bench.setup.lora,
        device=ceiling.device,
        tokens=bench.setup.seq * bench.setup.batch,
        step_ms=1e3 * statistics.median(whole),
        floor_ms=1e3 * sum(floors.values()),
        parts=[
            TrainStepPart(part=n, median_ms=1e3 * s, share=s / total, floor_ms=1e3 * floors[n])
            for n, s in medians.items()
        ],
        window=window.steps,
        kernels=window.kernels,
        memory=memory,
        trace=summary,
    )


def _parts(bench: TrainBench, device: torch.device) -> dict[str, float]:
    """Time the parts of a training step in one process; it trains as `train_step` does."""
    state = bench.state
    parallel, took = state.parallel, dict.fromkeys(PARTS, 0.0)
    valid = valid_tokens([batch.targets_T for batch in bench.batches], bench.state.device)
    began = 0.0

    def loss(hidden_TD: Tensor, vocabulary: Vocabulary, batch: Batch, valid: Tensor) -> Tensor:
        """Forward ends where the loss is known."""
        share = state.loss(hidden_TD, vocabulary, batch, valid)
        _wait(device)
        took["forward"] += time.perf_counter() - began
        return share

    for batch in bench.batches:
        before = took["forward"]
        _wait(device)
        began = time.perf_counter()
        both = _seconds(
            device,
            lambda batch=batch: parallel.forward_backward(
                [batch], loss, state.scale.enlarge(valid)
            ),
        )
        took["backward"] += both - (took["forward"] - before)
    norms: list[torch.Tensor] = []
    took["norm"] = _seconds(device, lambda: norms.append(parallel.grad_norm()))
    factor = state.scale.shrink(clip_factor(norms[0], state.config.optim.max_norm))
    state.step += 1
    took["update"] = _seconds(
        device,
        lambda: state.optimizer.update(parallel.gradients(), state.step, 1e-6, factor),
    )
    parallel.zero_grad()
    return took


def _seconds(device: torch.device, call: Callable[[], object]) -> float:
    """Time of a call, with the device idle before and after it."""
    _wait(device)
    began = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _floors(bench: TrainBench, ceiling: Ceiling, unit: str) -> dict[str, float]:
    lengths = [n for batch in bench.batches for n in batch.lengths]
    forward = step_flops(bench.state.spec, lengths) / 3
    both = step_flops(bench.state.spec, lengths, frozen=bench.setup.lora > 0)
    rate = ceiling.flops_per_s.get(unit, float("inf"))
    weights = _trained_bytes(bench)
    states = sum(t.nbytes for ts in bench.state.optimizer.tensors().values() for t in ts.values())
    moved = {
        "norm": weights,
        "update": 3 * weights + 2 * states,
    }  # gradients are as wide as weights
    return {
        "forward": forward / rate,
        "backward": (both - forward) / rate,
        **{name: size / ceiling.bytes_per_s for name, size in moved.items()},
    }


def _trained_bytes(bench: TrainBench) -> int:
    return sum(p.nbytes for p in bench.state.parallel.parameters().values())


def _memory(bench: TrainBench) -> list[HeldMemory]:
    state = bench.state
    predicted = predict(state.spec, state.config, not bench.setup.plain, frozen_values(state))
    roles = state.optimizer.tensors()
    masters = sum(t.nbytes for r, ts in roles.items() if "master" in r for t in ts.values())
    measured = {
        "weights": None
        if bench.setup.lora
        else _trained_bytes(bench),  # frozen ones are not listed
        "states": sum(t.nbytes for ts in roles.values() for t in ts.values()) - masters,
        "masters": masters,
    }
    rows = [
        HeldMemory(what=n, measured=measured.get(n), predicted=b)
        for n, b in predicted.table().items()
    ]
    peak = torch.cuda.max_memory_allocated() if bench.device != "cpu" else None
    return [*rows, HeldMemory(what="peak", measured=peak, predicted=predicted.total())]


@contextmanager
def _recorded(out: Path | None) -> Iterator[Callable[[ProfileWindow], TraceSummary | None]]:
    """Spans of the host go to a file until the caller is done; then they and the kernels become one timeline."""
    if out is None or events.listening():  # then CAIRN_EVENTS is set, and `cairn trace` draws them
        yield lambda window: None
        return
    with TemporaryDirectory(prefix="cairn-profile-") as folder:
        host, device = Path(folder) / "host.jsonl", Path(folder) / "device.jsonl"
        events.listen(host, name="cairn profile train")

        def finish(window: ProfileWindow) -> TraceSummary:
            device_spans(host, device, [window])
            return write_trace([host, device], out)

        yield finish
