"""Engines over tiny checkpoints of every family, the prompts that tests give them, and what has to come back.

    engine = tiny_engine("gemma3", chunked=True, tight=True)
    assert answers(engine, prompts) == [greedy("gemma3", prompt, n) for prompt in prompts]

The weights are those of `tiny_checkpoints`: lively, so that a wrong key or position changes the next token.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import tiny_checkpoints
import torch

from cairn.models.attend import Cached, KVCache
from cairn.models.cache import cache_groups, paged
from cairn.models.checkpoint import open_checkpoint
from cairn.models.generate import GenerateSampling, Generation
from cairn.models.runnable import OpenModel, Runnable
from cairn.models.transformer import Transformer
from cairn.serve.config import EngineConfig
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start_with

VOCABULARY = 211
PAGE = 16
MOST = 14  # outputs of a request of the matrix


@functools.cache
def model(family: str) -> Transformer:
    return open_checkpoint(tiny_checkpoints.folder(family)).load("cpu", torch.float32)


def tiny_engine(
    family: str,
    *,
    chunked: bool = False,
    prefix: bool = True,
    tight: bool = False,
    overlap: bool = False,
    plain: bool = False,
    invariant: bool = False,
    rows: int = 16,
    pages: int | None = None,
    budget: int | None = None,
    groups: bool = True,
    speculate: str = "off",
    draft_tokens: Any = "auto",
    host: str | None = None,
    disk: str | None = None,
    kv: dict[str, str] | None = None,
    **more: Any,
) -> Engine:
    """`pages`: of one cache group; there are as many for each of the model's. `more`: as `start_with` takes it.

    `host`, `disk`: as --kv-offload-host and --kv-offload-disk have them; loading is then always the fastest. `kv`:
    further options of the cache.
    """
    # An invariant runner changes the expert layers of its model.
    net = fixed_model(family) if invariant else model(family)
    count = len(paged(cache_groups(net.spec, grouped=groups and not plain)))
    config = EngineConfig(
        model=family, device="cpu", dtype="float32", block_size=PAGE, max_num_seqs=rows, plain=plain,
        max_num_batched_tokens=budget or (24 if chunked else 512),
        num_gpu_blocks_override=count * (pages or (7 if tight else 96)), cache_groups=groups,
        enable_prefix_caching=prefix, batch_invariant=invariant,
        speculate=speculate, draft_tokens=draft_tokens, kv_offload_host=host, kv_offload_disk=disk,
        **(kv or {}),
    )  # fmt: skip
    opened = OpenModel(family, net.spec, None, (), None)
    engine = start_with(opened, Runnable(family, net, "a test"), config, **more).engine
    engine.overlap = overlap
    if engine.tiers is not None:
        engine.tiers.compute = lambda first, last: 1e3 * (last - first)
    return engine


@functools.cache
def fixed_model(family: str) -> Transformer:
    return open_checkpoint(tiny_checkpoints.folder(family)).load("cpu", torch.float32)


def prompt_of(length: int, seed: int) -> list[int]:
    return [(seed * 31 + i * i * 7 + i * 13 * (seed + 1)) % VOCABULARY for i in range(length)]


def submit(engine: Engine, prompts: Iterable[Sequence[int]], **params: Any) -> list[Request]:
    settings = {"temperature": 0.0, "max_tokens": MOST} | params
    first = engine.scheduler.queues.arrivals
    requests = [
        Request(first + i, prompt, SamplingParams(**settings)) for i, prompt in enumerate(prompts)
    ]
    for request in requests:
        engine.add(request)
    return requests


def greedy(family: str, prompt: Sequence[int], most: int = MOST) -> list[int]:
    return _greedy(family, tuple(prompt), most)


@functools.cache
def _greedy(family: str, prompt: tuple[int, ...], most: int) -> list[int]:
    return list(Generation(model(family), prompt, GenerateSampling(max_tokens=most), ()))


@torch.inference_mode()
def all_logits(net: Transformer, tokens: Sequence[int]) -> torch.Tensor:
    """Scores after each of the tokens, by the contiguous reference in one pass."""
    weight = net.embedding.weight
    attend = Cached([KVCache(net.spec, len(tokens), weight.dtype, weight.device)], [len(tokens)])
    return net.logits(net(torch.tensor(tokens), attend.positions_T(), attend))


def at_rest(engine: Engine) -> None:
    """Nothing is left of the requests that were served."""
    engine.scheduler.queues.check_integrity()
    usage = engine.scheduler.blocks.usage()
    assert (usage.used, usage.free) == (0, usage.total)
    assert sorted(engine.scheduler.queues.free_rows) == list(range(engine.scheduler.limits.rows))
    assert not engine.has_work
    assert not engine.scheduler.requests
    assert not engine.scheduler._in_flight
    assert not engine.scheduler.blocks._tables
    assert not engine.prompt_logprobs
