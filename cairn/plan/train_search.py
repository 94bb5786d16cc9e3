"""Which layout trains this model fastest on these GPUs? All of them are tried, and each that lost says why.

    dp x fsdp x pp x cp x tp (x ep)  x  recompute  x  microbatch

      cannot     the trainer's own check refuses it, with its equation (`train.parallel.layout.check`)
      too large  memory by part, against what the device has
      slower     by how much, and which part of the step is to blame

Ties go to the simpler layout. Pure, and under a second for 8B on 64 GPUs.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator

import msgspec

from cairn.core.errors import ConfigError
from cairn.core.units import format_bytes
from cairn.models.spec import ModelSpec
from cairn.plan.device import Device
from cairn.plan.train_cost import Choice, Job, StepTime, step_time
from cairn.plan.train_memory import rank_memory
from cairn.train.memory import OF_DEVICE, Memory
from cairn.train.parallel.layout import Layout, Options, Work, check
from cairn.train.recompute_kinds import KINDS

BEST = 10
TIE = 0.005  # steps that differ by half a percent are as fast as each other
MICROBATCHES = (1, 2, 4, 8, 16)
MOST_TP = 8  # beyond a node tp is never worth it
KINDS_OF_LOSS = ("cannot", "too large", "slower")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One choice that would run."""

    choice: Choice
    seconds: float
    tokens_per_s: float  # all GPUs
    mfu: float  # the model's FLOPs, causal attention counted once, of the vendor's peak
    time: StepTime
    memory: Memory
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
    lost: list[Lost]
    tried: int
    fitting: int


def search(
    job: Job, gpus: int, device: Device, done: Callable[[str], None] = lambda what: None
) -> TrainPlan:
    """`done` hears of every layout that has choices, when it comes up."""
    if gpus < 1:
        raise ConfigError(f"{gpus} GPUs", hint="at least 1")
    rows: list[Row] = []
    lost: Counter[tuple[str, str]] = Counter()
    examples: dict[tuple[str, str], str] = {}
    tried = 0

    def lose(kind: str, reason: str, choice: Choice) -> None:
        lost[kind, reason] += 1
        examples.setdefault((kind, reason), choice.words())

    enough: tuple[Layout, int] | None = None  # fits already, so that more recomputation only costs
    layout: Layout | None = None
    for choice in choices(job, gpus):
        tried += 1
        if choice.layout != layout:
            layout = choice.layout
            done(layout.words())
        if (choice.layout, choice.microbatch) == enough:
            lose("slower", BLAME["recompute"], choice)
            continue
        refused = _refused(job, choice, gpus)
        if refused is not None:
            lose("cannot", refused, choice)
            continue
        memory = rank_memory(job, choice)
        if memory.total() > OF_DEVICE * device.memory_bytes:
            lose("too large", too_large(memory, device), choice)
            continue
        enough = (choice.layout, choice.microbatch)
        rows.append(_row(job, choice, device, gpus, memory))
    rows.sort(
        key=lambda row: (round(math.log(row.seconds) / TIE), _complexity(row.choice), row.seconds)
    )
    for row in rows[BEST:]:
        lose("slower", _blame(rows[0], row)[0], row.choice)
    best = [
        msgspec.structs.replace(row, why=loses(rows[0], row) if place else "")
        for place, row in enumerate(rows[:BEST])
    ]
    table = [
        Lost(kind=kind, reason=reason, count=count, example=examples[kind, reason])
        for (kind, reason), count in sorted(
            lost.items(), key=lambda item: (KINDS_OF_LOSS.index(item[0][0]), -item[1])
        )
    ]
    return TrainPlan(
        gpus=gpus, device=device, rows=best, lost=table, tried=tried, fitting=len(rows)
    )


def choices(job: Job, gpus: int) -> Iterator[Choice]:
    for layout in layouts(job.spec, gpus):
        for microbatch in MICROBATCHES:
            if job.sequences % (layout.data_ranks() * microbatch):
                continue
            for recompute in KINDS:
                yield Choice(layout=layout, microbatch=microbatch, recompute=recompute)


def layouts(spec: ModelSpec, gpus: int) -> Iterator[Layout]:
    """Every way to write the number of GPUs as a product, experts over powers of two of the data ranks."""
    for tp in _divisors(min(gpus, MOST_TP), gpus):
        for pp in _divisors(min(gpus, spec.layers), gpus // tp):
            for cp in _divisors(gpus, gpus // tp // pp):
                rest = gpus // tp // pp // cp
                for fsdp in _divisors(rest, rest):
                    for ep in _expert_ranks(spec, rest):
                        yield Layout(dp=rest // fsdp, fsdp=fsdp, pp=pp, cp=cp, tp=tp, ep=ep)


def _expert_ranks(spec: ModelSpec, ranks: int) -> list[int]:
    if spec.experts is None:
        return [1]
    return [ep for ep in _divisors(ranks, ranks) if spec.experts.count % ep == 0]


def _divisors(most: int, number: int) -> list[int]:
    return [size for size in range(1, most + 1) if number % size == 0]


def _refused(job: Job, choice: Choice, gpus: int) -> str | None:
    """The trainer's own word on a layout, shortened to what does not change from one choice to the next."""
    layout = choice.layout
    # A schedule that runs with twice its stages runs with more; the check need not write a long one down.
    microbatches = min(job.sequences // (layout.data_ranks() * choice.microbatch), 2 * layout.pp)
    work = Work(
        tokens=job.sequence * choice.microbatch, microbatches=microbatches, options=Options()
    )
    try:
        check(layout, gpus, job.spec, work)
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
        choice=choice, seconds=seconds, tokens_per_s=job.sequence * job.sequences / seconds,
        mfu=flops / (seconds * gpus * device.peak_flops_per_s), time=time, memory=memory,
    )  # fmt: skip


def _complexity(choice: Choice) -> tuple[int, int, int]:
    layout = choice.layout
    axes = sum(
        size > 1 for size in (layout.dp, layout.fsdp, layout.pp, layout.cp, layout.tp, layout.ep)
    )
    return axes, KINDS.index(choice.recompute), -choice.microbatch


def _blame(best: Row, row: Row) -> tuple[str, float]:
    """The part of the step that costs this one most over the best."""
    gaps = {name: seconds - best.time.table()[name] for name, seconds in row.time.table().items()}
    part = max(gaps, key=lambda name: gaps[name])
    return BLAME[part], gaps[part]


def loses(best: Row, row: Row) -> str:
    if row.seconds <= best.seconds * (1 + TIE):
        return "as fast, and less simple"
    blamed, seconds = _blame(best, row)
    return f"{row.seconds / best.seconds - 1:.1%} slower: {blamed} ({1e3 * seconds:,.0f} ms more)"


BLAME = {
    "products": "products run slower when tp cuts them",
    "attention": "attention",
    "between": "more bytes between products",
    "recompute": "it computes again what it could keep",
    "tensor": "collectives of tp wait in every layer",
    "context": "keys and values travel round cp",
    "expert": "tokens travel to their experts",
    "data": "collectives of dp and fsdp are not hidden",
    "bubble": "the pipeline's bubble",
    "update": "every replica updates all of its weights",
}
