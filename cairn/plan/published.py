"""What others have published about training on several GPUs, beside what this model says. Data and a comparison.

Rows are tokens per second and GPU. The stacks differ from ours (eager or compiled, other attention), so each row says
what it ran; the planner's constants are the same for all.
"""

import msgspec

from cairn.models.presets import preset
from cairn.models.spec import ModelSpec
from cairn.plan.device import device
from cairn.plan.train_cost import Choice, Job, Kernels, step_time
from cairn.train.parallel.layout import Layout
from cairn.train.recompute_kinds import Recompute


class Published(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    gpu: str
    model: str
    sequence: int
    microbatch: int
    tokens_per_s: float  # of one GPU
    layout: Layout
    recompute: Recompute = "none"
    kernels: Kernels = "fused"
    fp8: bool = False


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def mpt(hidden: int, layers: int) -> ModelSpec:
    """MosaicML's MPT: GPT-2's layers with heads of 128."""
    return msgspec.structs.replace(
        preset("gpt2-xl"), vocab=50_368, hidden=hidden, layers=layers, heads=hidden // 128,
        kv_heads=hidden // 128, head_dim=128, intermediate=4 * hidden, context=8192,
    )  # fmt: skip


MODELS = {
    "mpt-760m": (1536, 24),
    "mpt-1.3b": (2048, 24),
    "mpt-2.65b": (2560, 32),
    "mpt-6.7b": (4096, 32),
}

_FSDP8, _FSDP4 = Layout(fsdp=8), Layout(fsdp=4)


def _mpt(
    model: str, sequence: int, microbatch: int, tokens: float, recompute: Recompute = "none"
) -> Published:
    return Published(
        what=f"{model} seq {sequence} x {microbatch}, llm-foundry, 8xH100", gpu="h100", model=model,
        sequence=sequence, microbatch=microbatch, tokens_per_s=tokens, layout=_FSDP8, kernels="plain",
        recompute=recompute,
    )  # fmt: skip


# torchtitan's and torchao's own tables, llm-foundry's benchmarking README, KempnerForge's scaling page, llm.c.
ROWS = (
    Published(what="Llama-3 8B seq 8192 x 2, torchtitan compiled, 8xH100 of 500 W", gpu="h100-500w",
              model="llama-3.1-8b", sequence=8192, microbatch=2, tokens_per_s=6667, layout=_FSDP8,
              recompute="selective"),
    Published(what="Llama-3 8B seq 8192 x 1, torchao compiled, 8xH100 of 500 W", gpu="h100-500w",
              model="llama-3.1-8b", sequence=8192, microbatch=1, tokens_per_s=6150, layout=_FSDP8,
              recompute="selective"),
    Published(what="Llama-3 8B fp8 seq 8192 x 2, torchtitan compiled, 8xH100 of 500 W", gpu="h100-500w",
              model="llama-3.1-8b", sequence=8192, microbatch=2, tokens_per_s=8532, layout=_FSDP8,
              recompute="selective", fp8=True),
    Published(what="Llama-3 8B seq 4096 x 4, KempnerForge, FSDP on 4xH200", gpu="h200", model="llama-3.1-8b",
              sequence=4096, microbatch=4, tokens_per_s=9746, layout=_FSDP4, recompute="full"),
    Published(what="Llama-3 8B seq 4096 x 4, KempnerForge, TP on 4xH200", gpu="h200", model="llama-3.1-8b",
              sequence=4096, microbatch=4, tokens_per_s=6284, layout=Layout(tp=4), recompute="full"),
    _mpt("mpt-760m", 2048, 24, 63_100),
    _mpt("mpt-1.3b", 2048, 14, 45_500),
    _mpt("mpt-1.3b", 4096, 7, 38_500),
    _mpt("mpt-1.3b", 8192, 3, 29_200),
    _mpt("mpt-2.65b", 1024, 20, 27_000),
    _mpt("mpt-2.65b", 4096, 5, 21_000),
    _mpt("mpt-2.65b", 8192, 3, 16_600),
    _mpt("mpt-6.7b", 2048, 6, 10_600),
    _mpt("mpt-6.7b", 4096, 16, 8_600, "full"),
    Published(what="GPT-2 1558M seq 1024 x 16, llm.c, 8xH100", gpu="h100", model="gpt2-xl", sequence=1024,
              microbatch=16, tokens_per_s=46_800, layout=Layout(dp=8)),
)  # fmt: skip


def compare() -> list[Compared]:
    found = []
    for row in ROWS:
        spec = mpt(*MODELS[row.model]) if row.model in MODELS else preset(row.model)
        job = Job(spec=spec, sequence=row.sequence, sequences=row.microbatch * row.layout.data_ranks() * 2,
                  fp8=row.fp8, kernels=row.kernels)  # fmt: skip
        choice = Choice(layout=row.layout, microbatch=row.microbatch, recompute=row.recompute)
        seconds = step_time(job, choice, device(row.gpu)).total()
        rate = job.sequence * job.sequences / seconds / row.layout.world()
        found.append(Compared(what=row.what, measured=row.tokens_per_s, predicted=rate))
    return found
