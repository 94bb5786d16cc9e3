"""`cairn kernels build`: kernels compiled ahead of time, for a GPU that need not be here."""

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import tyro

from cairn.core.config import load
from cairn.core.errors import UsageError
from cairn.core.units import format_bytes, format_duration
from cairn.report.progress import progress

# What `cairn serve` sets on a GPU; `LLM` and the benchmarks leave the engine's own defaults.
SERVER = {"max_num_batched_tokens": 4096, "step_ms": 25.0}
MODELS = ["qwen3-0.6b", "qwen3-8b", "llama-3.1-8b"]


class Build(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Compile the kernels that engines launch into a folder, so that a fresh machine compiles nothing. Needs no GPU.

    Which kernels those are depends on the shapes of the models, so name yours. `cairn serve --kernel-cache DIR`, or
    CAIRN_KERNEL_CACHE=DIR for every verb, then finds them. Build with the same Triton that will run them.
    """

    out: Path
    """the folder; what it already has is not compiled again"""
    architecture: Annotated[str, tyro.conf.arg(aliases=["--for"])] = "sm_90"
    """--for sm_90: what the machine code is for"""
    models: list[str] = msgspec.field(default_factory=MODELS.copy)
    """shapes such as qwen3-8b, folders with a config.json, or names on the hub"""
    gpu: str = "NVIDIA H200"
    """whose tuned configurations and memory count, as its driver calls it"""
    dtype: str = "bfloat16"
    """of weights: bfloat16, float16 or float32"""
    quantization: str = ""
    """form of the weights, as the engine will get it: fp8, w8a16, w4a16, nvfp4, or mxfp4 for experts; "" as they are"""
    kv_cache: Literal["auto", "fp8"] = "auto"
    """type of keys and values, as the engine will get it"""
    head: Literal["auto", "8bit"] = "auto"
    """form of the output projection, as the engine will get it"""
    speculate: str = "off"
    """who drafts, as the engine will get it: off, ngram, or random:eagle3 for a head"""
    draft_tokens: int | Literal["auto"] = "auto"
    """most drafts of a request in a step, as the engine will get it"""
    max_model_len: int | None = None
    """longest request, as the engine will get it; default: what the model was made for"""
    max_num_seqs: int | None = None
    """most requests that run at once, as the engine will get it"""
    workers: Annotated[int, msgspec.Meta(ge=0)] = 0
    """how many compilers run at once; 0: one for each core"""
    json: bool = False
    """print one JSON document instead of lines"""


def run_build(args: list[str]) -> int:
    options = load(Build, args=args, env_prefix="CAIRN_KERNELS_BUILD_").value
    if not options.models:
        raise UsageError("no model is named", hint=f"such as --models {' '.join(MODELS)}")
    from cairn.kernels.tooling.build_ahead import build, by_hash, write_manifest
    from cairn.plan.model_shape import model_shape
    from cairn.serve.config import EngineConfig
    from cairn.serve.engine.dry_run import Engine, launches_of_all

    began = time.perf_counter()
    engines = []
    for asked in options.models:
        name, spec, *_ = model_shape(asked)
        config = EngineConfig(
            model=name,
            device="cuda",
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            weights=options.quantization or "auto",
            kv_cache_dtype=options.kv_cache,
            head=options.head,
            speculate=options.speculate,
            draft_tokens=options.draft_tokens,
        )
        for one in (config, msgspec.structs.replace(config, **SERVER)):
            engines.append(Engine(spec, one, options.gpu, options.architecture))
    see = partial(launches_of_all, engines)
    launches = by_hash(see())
    failures = []
    workers = options.workers or os.cpu_count() or 1
    with progress(len(launches), "compiling") as advance:
        for built in build(launches, see, options.out, workers):
            failures += [built] if built.error else []
            advance(built.name)
    for failed in failures:
        print(f"{failed.name}: {failed.error}", file=sys.stderr)
    made = write_manifest(options.out, options.architecture, options.gpu, options.models)
    took = time.perf_counter() - began
    if options.json:
        document = {**msgspec.to_builtins(made), "failures": failures, "seconds": took}
        print(msgspec.json.format(msgspec.json.encode(document)).decode())
    else:
        size = sum(path.stat().st_size for path in options.out.glob("*/*"))
        print(
            f"{len(launches)} kernels for {', '.join(options.models)} on {options.gpu}, and {made.launchers} "
            f"launchers, in {options.out}: {format_bytes(size)}; took {format_duration(took)}"
        )
    return 1 if failures else 0
