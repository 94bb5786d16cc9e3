"""Tensor-parallel rank: the collectives of `Shards` over torch.distributed.

    gloo on CPUs, NCCL on GPUs; ranks of one host meet in a file of the engine's private folder

For inference: no gradients, and sums in place where the layers hand over a fresh tensor. Every rank gathers the same
logits, bit by bit, and draws with the same seed, so all ranks sample the same tokens without telling each other.
Which requests run is not this file's business: the ranks' schedulers agree because they hear the same commands.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from cairn.core.errors import CairnError, ConfigError
from cairn.models.checkpoint import default_device
from cairn.models.shards import ALONE, Shards
from cairn.serve.config import EngineConfig


class Ranks:
    """This process as one of `size`."""

    def __init__(self, rank: int, size: int, whole_experts: bool = False) -> None:
        self.rank, self.size, self.whole_experts = rank, size, whole_experts

    def enter(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=-1)

    def whole(self, weight: Tensor) -> Tensor:
        return weight

    def smallest(self, number: int) -> int:
        """Minimum over all ranks."""
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        least = torch.tensor(number, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)


def all_or_none(shards: Shards, problem: CairnError | None, otherwise: str) -> None:
    """Raise on every rank where one has a problem: its own, or `otherwise`. All ranks have to call it."""
    if isinstance(shards, Ranks) and not shards.smallest(int(problem is None)):
        problem = problem or ConfigError(otherwise)
    if problem is not None:
        raise problem


def join_ranks(config: EngineConfig, rank: int, folder: str) -> Shards:
    """Meet the other ranks; returns when all are there."""
    size = config.tensor_parallel_size
    if size == 1:
        return ALONE
    on_gpu = device_kind(config.device) == "cuda"
    if on_gpu:
        if size > torch.cuda.device_count():
            raise ConfigError(
                f"tensor_parallel_size is {size}, and this machine has {torch.cuda.device_count()} GPUs",
                hint="use one rank for each GPU",
            )
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(max(torch.get_num_threads() // size, 1))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # nothing listens beyond this machine
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=(Path(folder) / "ranks").as_uri(),
        rank=rank,
        world_size=size,
    )
    return Ranks(rank, size, config.enable_expert_parallel)


def device_of(shards: Shards, device: str) -> str:
    """Device of this rank."""
    if shards.size == 1:
        return device
    return f"cuda:{shards.rank}" if device_kind(device) == "cuda" else "cpu"


def device_kind(device: str) -> str:
    return (default_device() if device == "auto" else device).partition(":")[0]
