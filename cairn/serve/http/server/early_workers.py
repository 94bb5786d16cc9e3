"""The engine's processes, started before the server imports what it needs itself.

    server    flags -> start_early -> torch, tokenizer, endpoints ------> takes the workers -> wait -> listen
    workers            `-----------> torch, kernels, weights, graphs ------------------------> ready

Both sides import torch, which takes seconds, at the same time instead of one after the other. Whether the model
generates and torch sees the GPU is known only later: workers that are not taken are ended. Needs no torch.
"""

import os
from pathlib import Path

import msgspec

from cairn.hw.gpus import read_gpus
from cairn.serve.config import EngineConfig
from cairn.serve.engine.client import ProcessOptions
from cairn.serve.engine.process import WorkerGroup
from cairn.serve.http.server.settings import ServerConfig

# Fewer than offline: every step then has a graph, and no request waits long for the prompts of others.
GPU_STEP_TOKENS = 4096


def start_early(config: ServerConfig) -> WorkerGroup | None:
    """Start the workers early; None if the engine will run in a thread or no GPU is visible."""
    on_gpu = _sees_gpu(config.device)
    if not in_processes(config, on_gpu):
        return None
    options = ProcessOptions()
    return WorkerGroup(
        engine_config(config, on_gpu),
        beat_s=options.beat_s,
        grace_s=options.grace_s,
        role=config.separation,
    ).start()


def engine_config(config: ServerConfig, on_gpu: bool) -> EngineConfig:
    """Configuration of the server's engine."""
    engine = config.engine()
    if on_gpu and config.max_num_batched_tokens is None:
        return msgspec.structs.replace(engine, max_num_batched_tokens=GPU_STEP_TOKENS)
    return engine


def in_processes(config: ServerConfig, on_gpu: bool) -> bool:
    """Return whether the engine runs in separate processes: on GPUs by default, not on a CPU."""
    if config.engine_in == "auto":
        return config.tensor_parallel_size > 1 or on_gpu
    return config.engine_in == "process"


def _sees_gpu(device: str) -> bool:
    if device != "auto":
        return device.startswith("cuda")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and bool(read_gpus(Path("/"))[0])
