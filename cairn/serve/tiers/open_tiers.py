"""Creation of cache tiers from `--kv-offload-host` and `--kv-offload-disk`, or the reason why they are unsupported."""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from cairn.core.errors import ConfigError
from cairn.core.shared_secret import secret_from
from cairn.core.units import format_bytes, format_rate, parse_bytes
from cairn.models.checkpoint import Checkpoint
from cairn.models.runnable import OpenModel
from cairn.serve.config import EngineConfig
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.step_budget import NAMES, matmul_rate
from cairn.serve.separation.memory import identity
from cairn.serve.tiers.disk_segments import DiskSegments
from cairn.serve.tiers.disk_tier import DiskTier
from cairn.serve.tiers.object_pages import ObjectPages
from cairn.serve.tiers.page_copies import page_copies
from cairn.serve.tiers.page_tiers import PageTiers
from cairn.serve.tiers.peer_tier import PeerPages, PeerTier
from cairn.serve.tiers.recompute import Recompute
from cairn.serve.tiers.shared_pages import SharedPages

SAMPLES, SAMPLE_BYTES = 256, 4096  # of each file of a checkpoint


class DiskRoom(NamedTuple):
    place: str  # a folder, or an address of an object store
    bytes: int


def open_tiers(engine: Engine, opened: OpenModel, config: EngineConfig) -> list[str]:
    """Give a new engine its tiers; what was chosen, in a line each."""
    if config.kv_offload_host is None:
        return []
    _check(engine, config)
    runner, limits = engine.runner, engine.scheduler.limits
    room, of_page = read_size(config.kv_offload_host), runner.pool.page_bytes
    if room < of_page:
        raise ConfigError(
            f"kv_offload_host is {format_bytes(room)}, and a page has {format_bytes(of_page)}",
            hint="give it more room",
        )
    copies = page_copies(runner, room // of_page)
    disk, secret, model = None, secret_from(os.environ), ""
    if config.kv_offload_peers is not None or config.kv_offload_share is not None:
        model = fingerprint(engine, opened, config, timed=False)
    if config.kv_offload_disk is not None:
        where = read_room(config.kv_offload_disk)
        timed = "://" not in config.kv_offload_disk
        disk = DiskTier(_segments(where, of_page, fingerprint(engine, opened, config, timed)))
    elif config.kv_offload_peers is not None:
        peers = config.kv_offload_peers.split(",")
        where = [read_address("kv_offload_peers", one) for one in peers]
        disk = PeerTier([PeerPages(*one, model, of_page, secret) for one in where])
    rate = None
    if runner.device.type == "cuda":
        import torch

        name = torch.cuda.get_device_name(runner.device)
        rate = matmul_rate(name, NAMES.get(str(runner.model.embedding.weight.dtype), ""))
    compute = Recompute(runner.model.spec, limits.page_size, rate)
    tiers = PageTiers(engine.scheduler, copies, compute, disk)
    if config.kv_offload_share is not None:
        at = read_address("kv_offload_share", config.kv_offload_share)
        tiers.shared = SharedPages(tiers.host, copies.memory_SB, model, at, secret)
    engine.tiers = engine.scheduler.tiers = engine.scheduler.blocks.tiers = tiers
    return _notes(tiers, limits.page_size)


def _segments(where: DiskRoom, page_bytes: int, model: str) -> DiskSegments | ObjectPages:
    if "://" in where.place:
        return ObjectPages(where.place, where.bytes, page_bytes, model)
    return DiskSegments(Path(where.place).expanduser(), where.bytes, page_bytes, model)


def _check(engine: Engine, config: EngineConfig) -> None:
    limits, scales = engine.scheduler.limits, engine.runner.pool.scales
    if limits.states:
        raise ConfigError(
            "layers of this model keep a state, which changes with every token and is not kept in pages",
            hint="leave out --kv-offload-host: prefixes of this model are computed",
        )
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"kv_offload_host is given, and tensor_parallel_size is {config.tensor_parallel_size}",
            hint="ranks would see copies end at different steps; offload on one GPU only",
        )
    if not config.enable_prefix_caching:
        raise ConfigError(
            "kv_offload_host is given, and enable_prefix_caching is off",
            hint="pages are kept under the names of the prefix cache; leave that on",
        )
    others = {
        name: getattr(config, name)
        for name in ("kv_offload_disk", "kv_offload_share", "kv_offload_peers")
    }
    option = next((name for name, value in others.items() if value is not None), None)
    if option is not None and scales is not None and scales.are_measured:
        raise ConfigError(
            f"{option} is given, and the scales of the float8 cache are measured by each server for itself",
            hint=f"leave out --kv-cache-dtype or {option}, or serve a checkpoint that has the scales",
        )


def _notes(tiers: PageTiers, page_size: int) -> list[str]:
    def line(where: str, slots: int, rate: float) -> str:
        size = format_bytes(slots * tiers.copies.page_bytes)
        tokens = slots * page_size
        return f"{where}: {size} for {tokens} tokens of the KV cache, {format_rate(rate, 'B')}"

    notes = [line("host memory", tiers.host.slots, tiers.rate)]
    if tiers.shared is not None:
        notes.append(f"other servers of the model fetch pages at {tiers.shared.address}")
    disk = tiers.disk
    if isinstance(disk, PeerTier):
        where = ", ".join(peer.address for peer in disk.peers)
        notes.append(f"pages are fetched from {where}, where that is faster than computing them")
    elif disk is not None:
        notes.append(line(str(disk.segments.folder), disk.book.slots, disk.rate))
        notes.append(f"{len(disk.book)} pages are there from earlier servers")
    return notes


def read_size(text: str) -> int:
    """Bytes of "8GiB"; a bare number counts GiB, as in vLLM's --kv-offloading-size."""
    bare = text.replace(".", "", 1).isdigit()
    return parse_bytes(f"{text}GiB" if bare else text)


def read_address(name: str, text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{name} is {text!r}", hint="it has to be HOST:PORT, as in 10.0.0.2:7300")
    return host, int(port)


def read_room(text: str) -> DiskRoom:
    place, _, size = text.rpartition(":")
    if not place or "/" in size:  # the colon of an address
        raise ConfigError(
            f"kv_offload_disk is {text!r}",
            hint="it has to be DIR:SIZE or URL:SIZE, as in /data/kv:100GiB or s3://bucket/kv:100GiB",
        )
    return DiskRoom(place, read_size(size))


def fingerprint(engine: Engine, opened: OpenModel, config: EngineConfig, timed: bool) -> str:
    """The same for servers whose pages hold the same numbers: weights, their form, and the layout of a page.

    `timed`: the times of its files count, which are others on another machine.
    """
    runner = engine.runner
    pool, limits = runner.pool, engine.scheduler.limits
    windows = [(group.kind, group.window, group.layers) for group in limits.groups]
    layout = (
        tuple(pool.cache.shape[:2]),
        tuple(pool.cache.shape[3:]),
        str(pool.cache.dtype),
        windows,
    )
    form = (
        config.weights,
        config.quantization,
        config.context,
        config.speculate,
        str(pool.heads_first),
    )
    digest = hashlib.sha256(repr((runner.model.spec, layout, form)).encode())
    if opened.checkpoint is None:
        digest.update(identity(runner.model).encode())
    else:
        _sample(opened.checkpoint, digest, timed)
    return digest.hexdigest()


def _sample(checkpoint: Checkpoint, digest: "hashlib._Hash", timed: bool) -> None:
    """Hash every file's name, size, bytes at many offsets, and modification time.

    Training changes nearly every number; an edit of a few changes the time. Machines that share pages have files of
    other times, so there (not `timed`) an edit between the samples is not seen.
    """
    path = checkpoint.path
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    for file in files:
        status = file.stat()
        size = status.st_size
        digest.update(repr((file.name, size, status.st_mtime_ns if timed else 0)).encode())
        with file.open("rb") as opened:
            for at in range(0, size, max(size // SAMPLES, SAMPLE_BYTES)):
                opened.seek(at)
                digest.update(opened.read(SAMPLE_BYTES))
