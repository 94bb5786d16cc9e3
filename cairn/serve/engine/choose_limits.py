"""Limits of an engine: sequences and tokens of a step, context length, cache blocks.

Asked for, or what the memory that is left after loading allows; `Sizes.why` says which. The arithmetic is in `sizing`.
"""

from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from cairn.core.errors import ConfigError, HardwareError
from cairn.core.units import format_bytes
from cairn.hw.host import read_memory
from cairn.models.cache import CacheGroup, cache_groups, page_bytes, state_bytes, with_draft_layer
from cairn.models.runnable import Runnable
from cairn.models.spec import ModelSpec
from cairn.models.weights_fit import free_bytes
from cairn.serve.config import EngineConfig
from cairn.serve.engine.request import Limits, Policy
from cairn.serve.engine.sizing import (
    CPU_PAGE,
    CPU_ROWS,
    CPU_STEP_TOKENS,
    GPU_PAGE,
    GPU_ROWS,
    GPU_STEP_TOKENS,
    Memory,
    Sizes,
    size_pages,
    size_states,
    step_bytes,
)
from cairn.serve.engine.step_budget import mixed_step_tokens

AT_ONCE = 4  # requests of the longest kind, for max_model_len auto
UNKNOWN = 8 << 30  # bytes of a machine that does not say
CPU_SHARE = 0.1  # of the machine's memory
# Bytes, where half of what is free has them: a tenth of a small container has no room for a step.
SMALLEST_CACHE = 1 << 30


class StepSize(NamedTuple):
    """The most that one step may take, before the memory is counted."""

    tokens: int
    rows: int
    page_size: int


def choose_limits(
    runnable: Runnable, config: EngineConfig, with_head: bool = False
) -> tuple[Limits, Sizes]:
    """`with_head`: the layer of a head keeps keys and values, too."""
    model = runnable.model
    spec, weight, ranks = model.spec, model.embedding.weight, model.build.shards.size
    context = limits_context(spec, config)
    groups = cache_groups(spec, ranks, grouped=config.cache_groups and not config.plain)
    groups = with_draft_layer(groups, spec.layers) if with_head else groups
    step = _step_size(config, weight.is_cuda)
    rows, states, sizes = _fit(runnable, config, groups, step, context)
    policy: Policy = "shortest" if config.scheduling_policy == "shortest" else "fcfs"
    limits = Limits(
        rows=rows,
        step_tokens=step.tokens,
        mixed_step_tokens=mixed_step_tokens(spec, weight, ranks, config.step_ms, rows, step.tokens),
        context=context,
        pages=sizes.pages,
        page_size=sizes.page_size,
        groups=groups,
        states=states,
        vocabulary=spec.vocab,
        policy=policy,
        prefill_chunk=config.long_prefill_token_threshold,
    )
    if config.max_model_len == "auto":
        limits = msgspec.structs.replace(limits, context=longest_context(limits))
    return limits, sizes


def _step_size(config: EngineConfig, on_gpu: bool) -> StepSize:
    """Step size from the configuration, or the default of the device."""
    tokens = config.max_num_batched_tokens or (GPU_STEP_TOKENS if on_gpu else CPU_STEP_TOKENS)
    rows = min(config.max_num_seqs or (GPU_ROWS if on_gpu else CPU_ROWS), tokens)
    return StepSize(tokens, rows, config.block_size or (GPU_PAGE if on_gpu else CPU_PAGE))


def _fit(
    runnable: Runnable,
    config: EngineConfig,
    groups: tuple[CacheGroup, ...],
    step: StepSize,
    context: int,
) -> tuple[int, int, Sizes]:
    """Rows, slots for states and pages that fit into the memory beside the weights and one step."""
    spec, weight = runnable.model.spec, runnable.model.embedding.weight
    cache_dtype = cache_type(config, weight.is_cuda) or weight.dtype
    of_page = page_bytes(groups, step.page_size, cache_dtype.itemsize)
    of_state = state_bytes(groups, weight.dtype.itemsize)
    memory, fraction = memory_for_pages(weight.device, config.gpu_memory_utilization)
    of_step = step_bytes(spec, step.tokens, step.rows, weight.dtype.itemsize)
    states = size_states(of_state, memory, fraction, of_step, step.rows)
    rows = min(step.rows, states) if states else step.rows
    if config.num_gpu_blocks_override is not None:
        sizes = Sizes(config.num_gpu_blocks_override + 1, step.page_size, "as asked")
        _check_pages(sizes.pages, of_page, weight.device)
        return rows, states, sizes
    taken = of_step + int(states * of_state)
    sizes = size_pages(
        groups, memory, fraction, step.page_size, of_page, taken, rows, context, step.tokens
    )
    return rows, states, sizes


def limits_context(spec: ModelSpec, config: EngineConfig) -> int:
    """Limit the context to the trained length, as llama.cpp does; `start_notes` reports a larger request."""
    if config.max_model_len == "auto":
        return spec.context  # `longest_context` makes it shorter, once the pages are counted
    return min(config.max_model_len or spec.context, spec.context)


def longest_context(limits: Limits) -> int:
    """So long that AT_ONCE requests of this length fit into the cache, in whole pages; at most the model's."""
    together = msgspec.structs.replace(limits, pages=max(2, (limits.pages - 1) // AT_ONCE + 1))
    return max(min(limits.context, together.capacity), 1)


def cache_type(config: EngineConfig, on_gpu: bool) -> torch.dtype | None:
    """The type of keys and values; None: the model's."""
    if config.kv_cache_dtype == "auto":
        return None
    if not on_gpu:
        raise ConfigError(
            "kv_cache_dtype is fp8, and the device is a CPU", hint="leave it out, or serve on a GPU"
        )
    return torch.float8_e4m3fn


def memory_for_pages(device: torch.device, fraction: float) -> tuple[Memory, float]:
    """Memory available for cache blocks, and the fraction of it to use; a CPU is shared with other programs."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total, free), fraction
    host = read_memory(Path("/"))[0]  # or what the container may have of it
    usable = UNKNOWN if host.usable_bytes is None else host.usable_bytes
    free = usable if host.free_bytes is None else host.free_bytes
    allowed = int(fraction * max(usable * CPU_SHARE, min(SMALLEST_CACHE, free // 2)))
    return Memory(allowed, min(allowed, free), spare=0), 1.0


def _check_pages(pages: int, of_page: int, device: torch.device) -> None:
    """Check that the requested number of blocks fits into memory."""
    free = free_bytes(str(device))
    if free is not None and pages * of_page > free:
        raise HardwareError(
            f"{pages - 1} pages take {format_bytes(pages * of_page)}, and {format_bytes(free)} are free on {device}",
            hint=f"num_gpu_blocks_override can be {max(0, free // of_page - 1)} at most; without it as many are taken "
            "as fit",
        )


def groups_note(limits: Limits) -> str:
    """Describe the cache groups if the layers differ."""
    layers: dict[str, int] = {}
    for group in limits.groups:
        what = f"the last {group.window} tokens" if group.window else "every token"
        what = f"a state, in {limits.states} slots" if group.kind == "state" else what
        layers[what] = layers.get(what, 0) + len(group.layers)
    kept = [f"{count} layers keep {what}" for what, count in layers.items()]
    return f"{len(limits.groups)} cache groups: {', '.join(kept)}"
