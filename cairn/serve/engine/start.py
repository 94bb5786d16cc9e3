"""Startup of an engine: load the model, size the cache, choose the runner.

Every automatic choice is in `Started.notes`, one line each. Nothing here is hot.
"""

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from cairn.core.errors import ConfigError, HardwareError
from cairn.kernels.cpu.compiled import obstacle as no_cpu_kernels
from cairn.models.lean import obstacle as lean_obstacle
from cairn.models.linear.convert import convert_drafter
from cairn.models.linear.registry import CONVERTED
from cairn.models.mtp import DraftHead
from cairn.models.runnable import OpenModel, Runnable, open_model
from cairn.models.shards import ALONE, Shards
from cairn.models.transformer import Transformer
from cairn.serve.config import EngineConfig
from cairn.serve.engine.batch_invariant import InvariantRunner
from cairn.serve.engine.cache_scales import CacheScales
from cairn.serve.engine.choose_limits import cache_type, choose_limits
from cairn.serve.engine.cpu_threads import limit_threads
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.media import WaitingForRows
from cairn.serve.engine.ranks import Ranks, device_kind, device_of
from cairn.serve.engine.request import Limits
from cairn.serve.engine.runner import Runner
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.engine.sleep_memory import GpuMemory, sleep_memory
from cairn.serve.engine.speculate.choice import choose_drafter, make_speculation
from cairn.serve.engine.speculate.drafter import Drafter
from cairn.serve.engine.speculate.speculation import Speculation
from cairn.serve.engine.start_checks import check_experts, check_sight
from cairn.serve.engine.start_notes import form_notes, limit_notes, pace_note
from cairn.serve.engine.step_budget import CPU_STEP_S, Pace
from cairn.serve.engine.timed_blocks import TimedBlocks
from cairn.serve.engine.tower_runner import MOST_PATCHES, TowerRunner
from cairn.serve.engine.weight_forms import arrange_weights, check_form, convert

if TYPE_CHECKING:
    from cairn.kernels.built import Lookups
    from cairn.serve.engine.adapter_columns import AdapterColumns

MOST_ROWS = {"cpu": 8192, "cuda": 16384}  # of pictures, in the arena


class Started(NamedTuple):
    engine: Engine
    opened: OpenModel
    notes: list[str]  # what was chosen, and why


def start(config: EngineConfig, shards: Shards = ALONE, opened: OpenModel | None = None) -> Started:
    """`shards`: this process's place among those that share the model. `opened`: the model, if it is open already."""
    if config.tensor_parallel_size != shards.size:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size}, and this process is one of {shards.size}",
            hint="use EngineClient, which starts a process for each",
        )
    began = time.monotonic()
    opened = opened or open_model(config.model, config.context)
    check_experts(config, opened.spec)
    config = with_quantization(config, opened)
    device = device_of(shards, config.device)
    if opened.vision is not None:
        check_sight(opened.vision, config)
    threads = limit_threads() if device_kind(device) == "cpu" and shards.size == 1 else None
    memory = sleep_memory(config.enable_sleep_mode, device, config.tensor_parallel_size)
    with memory.weights() if memory is not None else nullcontext():
        packed_stays = stays_packed(config, device, opened)
        runnable = opened.load(device, config.dtype, shards, packed_stays)
    loaded = time.monotonic()
    started = start_with(opened, runnable, config, sole=True, memory=memory)
    engine_s = time.monotonic() - loaded
    started.notes.extend([threads] if threads else [])
    started.notes.append(
        f"weights loaded in {loaded - began:.1f} s, the engine made in {engine_s:.1f} s"
    )
    return started


def with_quantization(config: EngineConfig, opened: OpenModel) -> EngineConfig:
    """`quantization` says what the checkpoint is; one in floating point can be rounded as it is loaded."""
    method = config.quantization
    stored = opened.checkpoint.method() if opened.checkpoint else None
    if method is None or method == stored:
        return config
    if stored is None and method in CONVERTED:
        if config.weights not in ("auto", method):
            raise ConfigError(
                f"quantization is {method}, and weights is {config.weights}",
                hint="leave out --weights",
            )
        return msgspec.structs.replace(config, weights=method)
    raise ConfigError(
        f"quantization is {method}, and {config.model} is {stored or 'in floating point'}",
        hint=f"use --quantization {stored}, or leave it out"
        if stored
        else f"leave it out, or quantise it first: cairn quantize {config.model}",
    )


def stays_packed(config: EngineConfig, device: str, opened: OpenModel) -> bool:
    """Quantised matrices stay as they are stored where kernels multiply with them, unless floats are asked for."""
    if config.plain or config.batch_invariant:
        return False
    if device_kind(device) == "cuda":
        return config.weights == "auto"
    checkpoint = opened.checkpoint
    is_file = checkpoint is not None and checkpoint.path.is_file()
    # Packed rows of other checkpoints: of one process, in the type that the kernels compute with.
    alone = config.tensor_parallel_size == 1 and config.dtype in ("auto", "float32")
    is_quantised = is_file or (checkpoint is not None and checkpoint.quantised() and alone)
    if config.weights in ("auto", "int8", "int4"):
        # The last two are made of the blocks of a file, one matrix after another.
        kept = is_file or (config.weights == "auto" and is_quantised)
        return kept and config.head == "auto" and no_cpu_kernels() is None
    if config.weights != "packed":
        return False
    if not is_quantised:
        raise ConfigError(
            f"weights is packed, and {opened.name} is not quantised", hint="leave out --weights"
        )
    if why := no_cpu_kernels():
        raise HardwareError(f"no packed weights: {why}", hint="leave out --weights")
    return True


def _arena_rows(runnable: Runnable, limits: Limits) -> int:
    """Rows of the embedding arena of a vision encoder (0 without one). A request holds its rows until it ends."""
    if runnable.tower is None:
        return 0
    most = MOST_ROWS[runnable.tower.patch_embedding.weight.device.type]
    return min(limits.context * limits.rows, most)


def start_with(
    opened: OpenModel,
    runnable: Runnable,
    config: EngineConfig,
    *,
    sole: bool = False,
    drafter: Drafter | None = None,
    drafts: int = 0,
    device_drafts: bool = False,
    arena_rows: int = 0,
    memory: GpuMemory | None = None,
) -> Started:
    """Start with a loaded model; `sole`: no other engine uses it, so weights that this engine never reads are freed.

    `drafter`, in place of what `config.speculate` says, proposes up to `drafts` tokens of each request for a step to
    verify; with `device_drafts` only where the device cannot. `arena_rows`: of embeddings, for prompts with pieces.
    `memory`: of a model that may sleep.
    """
    model = runnable.model
    on_gpu = model.embedding.weight.is_cuda
    if runnable.tower is not None:
        check_sight(runnable.tower.spec, config)
    kernels = _built_kernels(config, on_gpu)
    chosen = choose_drafter(config, opened, model) if drafter is None else None
    if chosen is not None:
        drafts, device_drafts = chosen.drafts, chosen.on_device
    head = chosen.head if chosen is not None else None
    check_form(config, on_gpu)
    forms = _convert(model, config, head, memory, sole)  # before the memory that is left is counted
    columns = _adapter_columns(model, config, memory) if config.lora_room else None
    limits, why_pages = _limits(runnable, config, head, arena_rows)
    limits = msgspec.structs.replace(limits, drafts=drafts, device_drafts=device_drafts)
    if sole:
        model.requires_grad_(False)
    if not on_gpu:
        forms = forms or arrange_weights(runnable, config, sole)
        forms += _convert_head(head, model)
    runner = _runner(runnable, limits, config, head, memory)  # with the weights as they are by now
    forms += _keep_adapters(runner, config, columns)
    runner.source = config.model if opened.checkpoint is not None else None
    speculation = None if drafter is None else Speculation(drafter, on_device=device_drafts)
    if chosen is not None:
        widths = _row_widths(config, limits, on_gpu)
        speculation = make_speculation(chosen, config, runnable, widths)
    scheduler = Scheduler(limits, blocks=_blocks(limits, config), speculation=speculation)
    notes = [*limit_notes(opened, runnable, config, limits, why_pages)]
    notes += form_notes(runner, forms, kernels, chosen)
    engine = _engine(scheduler, runner, config, _media(opened, runnable, runner, scheduler))
    if engine.pace is not None:
        notes.append(pace_note(engine.pace))
    if config.kv_offload_host is not None:
        from cairn.serve.tiers.open_tiers import open_tiers

        notes += open_tiers(engine, opened, config)
    return Started(engine, opened, notes)


def _convert(
    model: Transformer,
    config: EngineConfig,
    head: DraftHead | None,
    memory: GpuMemory | None,
    sole: bool,
) -> list[str]:
    """Weights into the form that was asked for; on a GPU, the head's with them. A line for each."""
    with memory.weights() if memory is not None else nullcontext():
        notes = convert(model, config, sole)
        return notes + _convert_head(head, model) if model.embedding.weight.is_cuda else notes


def _convert_head(head: DraftHead | None, model: Transformer) -> list[str]:
    note = None if head is None else convert_drafter(head, model)
    return [] if note is None else [note]


def _limits(
    runnable: Runnable, config: EngineConfig, head: DraftHead | None, arena_rows: int
) -> tuple[Limits, str]:
    """Limits that all ranks agree on, and the explanation of the number of blocks."""
    model = runnable.model
    limits, sizes = choose_limits(runnable, config, head is not None)
    limits = msgspec.structs.replace(
        limits,
        pages=_agreed_pages(limits.pages, model.build.shards),
        arena_rows=arena_rows or _arena_rows(runnable, limits),
        axes=runnable.tower is not None and bool(model.spec.rope.sections),
    )
    return limits, sizes.why


def _keep_adapters(
    runner: Runner, config: EngineConfig, columns: "AdapterColumns | None"
) -> list[str]:
    runner.adapters.keep(config.max_loras)
    if columns is None or runner.adapters.slots is None:
        return []
    runner.adapters.slots.columns = columns
    return [columns.note()]


def _engine(
    scheduler: Scheduler, runner: Runner, config: EngineConfig, media: WaitingForRows | None
) -> Engine:
    on_gpu = runner.model.embedding.weight.is_cuda
    together = runner.model.build.shards.size > 1
    # Ranks would not decide the same by their clocks.
    pace = None if on_gpu or together or not config.step_ms else _pace(config.step_ms)
    overlap = on_gpu and not config.plain
    return Engine(scheduler, runner, overlap=overlap, together=together, pace=pace, media=media)


def _agreed_pages(pages: int, shards: Shards) -> int:
    """Memory that is free differs between ranks, pages must not."""
    return shards.smallest(pages) if isinstance(shards, Ranks) else pages


def _blocks(limits: Limits, config: EngineConfig) -> TimedBlocks:
    return TimedBlocks(
        limits.pages,
        limits.page_size,
        prefix_caching=config.enable_prefix_caching,
        groups=limits.groups,
        states=limits.states,
    )


def _adapter_columns(
    model: Transformer, config: EngineConfig, memory: GpuMemory | None
) -> "AdapterColumns":
    """Room for adapters behind the weights, before the memory for pages is counted."""
    why = "the device is a CPU" if not model.embedding.weight.is_cuda else None
    if model.build.shards.size > 1 or config.batch_invariant or config.plain:
        why = "adapters have no slots with several ranks, batch_invariant or plain"
    if why is None and memory is not None:
        why = "memory that sleeps is not laid out anew"
    if why is not None:
        raise ConfigError(f"lora_room is {config.lora_room}, and {why}", hint="leave it out")
    from cairn.serve.engine.adapter_columns import AdapterColumns
    from cairn.serve.engine.adapter_slots import BUCKETS, bucket_of

    columns = AdapterColumns(model, bucket_of(config.lora_room) or BUCKETS[-1])
    if not columns.room:
        raise ConfigError(
            f"lora_room is {config.lora_room}, and no weight is a matrix of floats without a bias",
            hint="leave it out: adapters are served without it, too",
        )
    return columns


def _built_kernels(config: EngineConfig, on_gpu: bool) -> "Lookups | None":
    """Lookup of kernels compiled ahead of time; None if they are compiled on demand."""
    if config.kernel_cache and not on_gpu:
        raise ConfigError(
            f"kernel_cache is {config.kernel_cache}, and the device is a CPU",
            hint="leave it out: it holds kernels of GPUs",
        )
    if not on_gpu:
        return None
    from cairn.kernels.built import use_configured

    return use_configured(config.kernel_cache)


def _pace(step_ms: float) -> Pace:
    return Pace(max(step_ms / 1e3, CPU_STEP_S))


def _media(
    opened: OpenModel, runnable: Runnable, runner: Runner, scheduler: Scheduler
) -> WaitingForRows | None:
    """Queue of requests that wait for image embeddings, for models with vision."""
    rules = opened.checkpoint.image_rules() if opened.checkpoint else None
    if runnable.tower is None or rules is None:
        return None
    tower = TowerRunner(runnable.tower, rules, runner.write_piece)
    most = MOST_PATCHES[tower.device.type]
    return WaitingForRows(scheduler.queues.arena, tower.encode, tower.patches, most)


def _row_widths(config: EngineConfig, limits: Limits, on_gpu: bool) -> tuple[int, ...]:
    """Tokens that rows of a verifying step are padded to; none: they are not."""
    if not on_gpu or config.enforce_eager or config.plain:
        return ()
    from cairn.serve.engine.cuda_graph import verify_widths

    return verify_widths(limits.drafts)


def _runner(
    runnable: Runnable,
    limits: Limits,
    config: EngineConfig,
    head: DraftHead | None,
    memory: GpuMemory | None,
) -> Runner:
    model = runnable.model
    if not model.embedding.weight.is_cuda:
        if config.batch_invariant:
            return InvariantRunner(model, limits)
        lean = not config.plain and lean_obstacle(model) is None
        return Runner(model, limits, lean=lean, head=head)
    from cairn.serve.engine.gpu_runner import GPURunner

    eager = config.enforce_eager or config.plain
    dtype = cache_type(config, on_gpu=True)
    runner = GPURunner(
        model,
        limits,
        dtype,
        graphs=not eager,
        fused=not config.plain,
        invariant=config.batch_invariant,
        scales=None
        if dtype is None or model.spec.latent  # whose rows have scales of their own
        else CacheScales(model.spec.layers, runnable.device, runnable.cache_scales),
        head=head,
        memory=memory,
    )
    if config.load_in_advance:
        runner.warm_up()
    return runner
