"""Search over all layouts for the fastest one, with a reason for each rejected layout.

    dp x fsdp x pp x cp x tp (x ep)  x  recompute  x  microbatch  x  order of the pipeline
    x  with fsdp: gradients that leave each microbatch, or once a step

      cannot     the trainer's own check refuses it, with its equation (`train.parallel.layout.check`)
      too large  memory by part, against what the device has
      slower     by how much, and which part of the step is to blame

Ties go to the simpler layout. Pure, and a second or two for 8B on 64 GPUs.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

import msgspec

from cairn.core.errors import ConfigError
from cairn.core.units import format_bytes
from cairn.models.spec import ModelSpec
from cairn.plan.device import Device
from cairn.plan.train_cost import Choice, Job, StepTime, step_time
from cairn.plan.train_memory import rank_memory
from cairn.train.memory import OF_DEVICE, Memory
from cairn.train.parallel.layout import AXES, Layout, Order, StepDemand, Strategy, check
from cairn.train.parallel.pipeline.schedules import schedule
from cairn.train.recompute_kinds import KINDS

BEST = 10
TIE = 0.005  # steps that differ by half a percent are as fast as each other
MICROBATCHES = (1, 2, 4, 8, 16)
ORDERS: tuple[Order, ...] = ("1f1b", "interleaved")
MOST_TP = 8  # beyond a node tp is never worth it
UNEVEN = "the sequences of a step do not divide by dp * fsdp * microbatch"
KINDS_OF_LOSS = ("cannot", "too large", "slower")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A feasible choice."""

    choice: Choice
    seconds: float
    tokens_per_s: float  # all GPUs
    mfu: float  # the model's FLOPs, causal attention counted once, of the vendor's bf16 peak
    time: StepTime
    memory: Memory
    flags: str  # of `cairn train`
    why: str = ""  # it lost to the first


class Lost(msgspec.Struct, frozen=True, kw_only=True):
    """A reason, how many choices it struck, and one of them."""

    kind: str
    reason: str
    count: int
    example: str


class TrainPlan(msgspec.Struct, frozen=True, kw_only=True):
    gpus: int
    device: Device
    rows: list[Row]  # the best ones, fastest first
    pipelined: Row | None  # the best of those with a pipeline, wherever it came
    lost: list[Lost]
    tried: int
    fitting: int


class Losses:
    """Why choices are not among the best: how often by reason, with the first example of each."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._examples: dict[tuple[str, str], str] = {}

    def add(self, kind: str, reason: str, example: str) -> None:
        self._counts[kind, reason] += 1
        self._examples.setdefault((kind, reason), example)

    def table(self) -> list[Lost]:
        """Rejections by category, then by frequency."""
        counts = self._counts.items()
        ordered = sorted(counts, key=lambda item: (KINDS_OF_LOSS.index(item[0][0]), -item[1]))
        return [
            Lost(kind=kind, reason=reason, count=count, example=self._examples[kind, reason])
            for (kind, reason), count in ordered
        ]


Pins = Mapping[str, int]  # axes of a layout whose size is given


def search(
    job: Job,
    gpus: int,
    device: Device,
    pins: Pins = {},  # noqa: B006  read only
    advance: Callable[[str], None] = lambda what: None,
) -> TrainPlan:
    """`pins`: axes that are decided already. `advance` is called with every layout that comes up."""
    if gpus < 1:
        raise ConfigError(f"{gpus} GPUs", hint="at least 1")
    if next(layouts(job.spec, gpus, pins), None) is None:
        check(Layout(**pins), gpus, job.spec)  # says which equation does not hold
    rows: list[Row] = []
    losses = Losses()
    choices_tried, room = 0, OF_DEVICE * device.memory_bytes
    layout: Layout | None = None
    for thriftier in _groups(job, gpus, pins):
        if thriftier[0].layout != layout:
            layout = thriftier[0].layout
            advance(layout.words())
        refused, fits = _refused(job, thriftier[0], gpus), False
        for choice in thriftier:
            choices_tried += 1
            if refused is not None:
                losses.add("cannot", *refused)
            elif fits:
                losses.add("slower", BLAME["recompute"], choice.words())
            elif (memory := rank_memory(job, choice)).total() > room:
                losses.add("too large", too_large(memory, device), choice.words())
            else:
                fits = True
                rows.append(_row(job, choice, device, gpus, memory))
    rows.sort(
        key=lambda row: (round(math.log(row.seconds) / TIE), _complexity(row.choice), row.seconds)
    )
    for row in rows[BEST:]:
        losses.add("slower", _blame(rows[0], row)[0], row.choice.words())
    piped = next((row for row in rows if row.choice.layout.pp > 1), None)
    return TrainPlan(
        gpus=gpus,
        device=device,
        rows=[_judged(rows[0], row) for row in rows[:BEST]],
        lost=losses.table(),
        tried=choices_tried,
        fitting=len(rows),
        pipelined=None if piped is None else _judged(rows[0], piped),
    )


def choices(job: Job, gpus: int) -> Iterator[Choice]:
    return (choice for group in _groups(job, gpus) for choice in group)


def _groups(job: Job, gpus: int, pins: Pins = {}) -> Iterator[list[Choice]]:  # noqa: B006
    """Choices that differ in recomputation alone, from the fastest to the thriftiest: the first that fits is best.

    With tp the tokens between the layers are always cut as well: as many bytes travel, and less is kept.
    """
    for layout in layouts(job.spec, gpus, pins):
        for microbatch in MICROBATCHES:
            several = job.sequences > layout.data_ranks() * microbatch  # microbatches on each rank
            for order in ORDERS if layout.pp > 1 else ORDERS[:1]:
                for whole in (False, True) if layout.fsdp > 1 and several else (False,):
                    yield [
                        Choice(
                            layout=layout,
                            microbatch=microbatch,
                            recompute=kind,
                            order=order,
                            sequence_parallel=layout.tp > 1,
                            whole_gradients=whole,
                        )
                        for kind in KINDS
                    ]


def layouts(spec: ModelSpec, gpus: int, pins: Pins = {}) -> Iterator[Layout]:  # noqa: B006
    """Every way to write the number of GPUs as a product, experts over divisors of the data ranks."""
    for tp in _divisors(max(MOST_TP, pins.get("tp", 1)), gpus):
        for pp in _divisors(max(spec.layers, pins.get("pp", 1)), gpus // tp):
            for cp in _divisors(gpus, gpus // tp // pp):
                rest = gpus // tp // pp // cp
                for fsdp in _divisors(rest, rest):
                    for ep in _expert_ranks(spec, rest):
                        layout = Layout(dp=rest // fsdp, fsdp=fsdp, pp=pp, cp=cp, tp=tp, ep=ep)
                        if all(getattr(layout, axis) == size for axis, size in pins.items()):
                            yield layout


def _expert_ranks(spec: ModelSpec, ranks: int) -> list[int]:
    if spec.experts is None:
        return [1]
    return [ep for ep in _divisors(ranks, ranks) if spec.experts.count % ep == 0]


def _divisors(most: int, number: int) -> list[int]:
    return [size for size in range(1, min(most, number) + 1) if number % size == 0]


def _refused(job: Job, choice: Choice, gpus: int) -> tuple[str, str] | None:
    """Why the trainer would refuse it, without what changes from one choice to the next, and an example with it."""
    layout = choice.layout
    samples = layout.data_ranks() * choice.microbatch
    if job.sequences % samples:
        equation = f"{job.sequences} % {samples} = {job.sequences % samples}"
        return UNEVEN, f"{choice.words()}: {equation}"
    work = StepDemand(
        tokens=job.sequence * choice.microbatch,
        strategy=Strategy(
            order=choice.order, chunks=choice.chunks, sequence_parallel=choice.sequence_parallel
        ),
        int8_states=job.states == "int8",
    )
    try:
        check(layout, gpus, job.spec, work)
    except ConfigError as error:
        return error.message, choice.words()
    refused = None
    if layout.pp > 1:
        refused = _unscheduled(choice.order, layout.pp, job.sequences // samples)
    return None if refused is None else (refused, choice.words())


@lru_cache(maxsize=4096)
def _unscheduled(order: Order, pp: int, microbatches: int) -> str | None:
    """Why there is no such schedule: the part of the check that writes it down, once for all layouts that share it."""
    if microbatches % pp == 0 or order == ORDERS[0]:
        # A schedule that runs with twice as many microbatches as stages also runs with more.
        microbatches = min(microbatches, 2 * pp)
    try:
        schedule(order, pp, microbatches)
    except ConfigError as error:
        return error.message
    return None


def too_large(memory: Memory, device: Device) -> str:
    part, _ = max(memory.table().items(), key=lambda item: item[1])
    over = memory.total() / (OF_DEVICE * device.memory_bytes)
    step = "up to 1.5" if over <= 1.5 else "up to 3" if over <= 3 else "more than 3"
    return f"{step} times what {format_bytes(device.memory_bytes)} leave, most of it {part}"


def _row(job: Job, choice: Choice, device: Device, gpus: int, memory: Memory) -> Row:
    time = step_time(job, choice, device)
    seconds = time.total()
    flops = job.spec.training_flops(job.sequence) * job.sequences
    return Row(
        choice=choice,
        seconds=seconds,
        tokens_per_s=job.sequence * job.sequences / seconds,
        mfu=flops / (seconds * gpus * device.peak_flops_per_s),
        time=time,
        memory=memory,
        flags=train_flags(job, choice),
    )


def train_flags(job: Job, choice: Choice) -> str:
    """The choice as flags of `cairn train`."""
    layout = choice.layout
    flags = {axis: getattr(layout, axis) for axis in (*AXES, "ep") if getattr(layout, axis) > 1}
    flags |= {
        "data.sequence": job.sequence,
        "data.sequences": job.sequences,
        "data.microbatch": choice.microbatch,
    }
    flags |= {
        "precision.kind": "bfloat16",
        "precision.recompute": choice.recompute,
        "optim.states": job.states,
    }
    if job.fp8:
        flags["precision.fp8"] = "tensor"
    if layout.pp > 1:
        flags["strategy.order"] = choice.order
    words = [f"--{name} {value}" for name, value in flags.items()]
    words += ["--strategy.sequence-parallel"] * choice.sequence_parallel
    words += ["--strategy.whole-gradients"] * choice.whole_gradients
    words += ["--precision.no-masters"] * (job.states == "bfloat16")
    return " ".join(words)


def _complexity(choice: Choice) -> tuple[int, int, int]:
    """Complexity of a choice: its number of parallel dimensions and options."""
    layout = choice.layout
    axes = sum(
        size > 1 for size in (layout.dp, layout.fsdp, layout.pp, layout.cp, layout.tp, layout.ep)
    )
    axes += (choice.order != ORDERS[0]) + choice.whole_gradients
    return axes, KINDS.index(choice.recompute), -choice.microbatch


def _blame(best: Row, row: Row) -> tuple[str, float]:
    """The part of the step that costs this one most over the best."""
    gaps = {name: seconds - best.time.table()[name] for name, seconds in row.time.table().items()}
    part = max(gaps, key=lambda name: gaps[name])
    if part == "products" and row.choice.layout.tp <= best.choice.layout.tp:
        return FEWER_ROWS, gaps[part]
    return BLAME[part], gaps[part]


def _judged(best: Row, row: Row) -> Row:
    return row if row is best else msgspec.structs.replace(row, why=loses(best, row))


def loses(best: Row, row: Row) -> str:
    if row.seconds <= best.seconds * (1 + TIE):
        return "as fast, and less simple"
    blamed, seconds = _blame(best, row)
    return f"{row.seconds / best.seconds - 1:.1%} slower: {blamed} ({1e3 * seconds:,.0f} ms more)"


FEWER_ROWS = "products of fewer tokens run slower"
BLAME = {
    "products": "products run slower when tp cuts them",
    "attention": "attention",
    "between": "more bytes between products",
    "recompute": "it computes again what it could keep",
    "tensor": "collectives of tp wait in every layer",
    "context": "keys and values travel round cp",
    "expert": "tokens travel to their experts",
    "stages": "activations travel from stage to stage",
    "data": "collectives of dp and fsdp are not hidden",
    "uneven": "stages wait for the one with the head or a layer more",
    "bubble": "the pipeline's bubble",
    "update": "every replica updates all of its weights",
}
