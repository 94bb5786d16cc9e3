"""An engine in numbers: what it is doing at this moment, and what its model is made of.

Read while the engine runs in another thread: counts that may be a step apart. Changes nothing.
"""

import time
from pathlib import Path

import torch

from cairn.hw.gpus import torch_uuid
from cairn.hw.host import read_cpu
from cairn.models.cache import cache_bytes_per_token
from cairn.models.linear.maps import held_bytes, linears
from cairn.models.transformer import Transformer
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.media import MediaCounts
from cairn.serve.engine.messages import Facts, Stats
from cairn.serve.engine.speculate.acceptance import Counts


def stats_of(engine: Engine) -> Stats:
    scheduler, spent = engine.scheduler, engine.spent
    counts = scheduler.speculation.counts if scheduler.speculation is not None else Counts()
    usage, prefix = scheduler.blocks.usage(), scheduler.blocks.prefix.statistics
    return Stats(
        engine.steps,
        scheduler.waiting,
        scheduler.running,
        usage.total,
        usage.used,
        usage.cached,
        prefix.tokens,
        prefix.hits,
        scheduler.queues.preemptions,
        spent.prefill,
        spent.sampled,
        spent.host,
        spent.device,
        time.monotonic(),
        getattr(engine, "remote_prefills", 0),
        getattr(engine, "prefill_fallbacks", 0),
        counts.drafted,
        counts.accepted,
        usage.groups,
        counts.runs,
        tuple(counts.by_position),
        *_tiers(engine),
        *_media(engine),
    )


def _media(engine: Engine) -> MediaCounts:
    media = getattr(engine, "media", None)
    return MediaCounts() if media is None else media.counts


def _tiers(engine: Engine) -> tuple[int, int, int, int, int]:
    """Counters of cache tiers: tokens loaded from host and disk, failed loads, blocks of both."""
    tiers = getattr(engine, "tiers", None)
    if tiers is None:
        return 0, 0, 0, 0, 0
    counts, disk = tiers.counts, 0 if tiers.disk is None else len(tiers.disk)
    return counts.host_tokens, counts.disk_tokens, counts.failed_loads, len(tiers.host), disk


def facts_of(engine: Engine) -> Facts:
    """Facts about the weights in memory, in any format."""
    model = getattr(engine.runner, "model", None)
    if model is None:  # a simulated device has no model
        return Facts()
    weight = model.embedding.weight
    ranks, of_value = model.build.shards.size, engine.runner.pool.cache.dtype.itemsize
    return Facts(
        device=str(weight.device),
        device_name=device_name(weight.device),
        dtype=str(weight.dtype).removeprefix("torch."),
        weights_bytes=held_bytes(model),
        read_bytes=_read(model),
        kv_bytes_per_token=cache_bytes_per_token(model.spec, of_value, ranks),
        ranks=ranks,
        page_bytes=engine.runner.pool.page_bytes,
        uuids=gpu_uuids(weight.device, ranks),
    )


def _read(model: Transformer) -> int:
    """Weight bytes read per decoded token."""
    if model.spec.experts is not None:
        return 0
    return sum(part.read_bytes() for part in linears(model))


def gpu_uuids(device: torch.device, ranks: int) -> list[str]:
    """UUIDs of the GPUs of all ranks, which are consecutive; empty on a CPU."""
    if device.type != "cuda":
        return []
    uuids = [torch_uuid((device.index or 0) + rank) for rank in range(ranks)]
    return [uuid for uuid in uuids if uuid is not None]


def device_name(device: torch.device) -> str:
    if str(device) == "cpu":
        return read_cpu(Path("/")).model or "CPU"
    return torch.cuda.get_device_name(device)
