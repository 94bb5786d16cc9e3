"""Published training runs, compared with the planner's predictions. Data and a comparison.

    torchtitan        benchmarks/llama3_h100_202412 (8 to 512 GPUs), llama3-8b_h200_202506; torchao's training docs
    Megatron-Bridge   performance summaries 25.11 and 26.02 (8 to 1,024 GPUs); NeMo AutoModel's
    NeMo              performance summary of container 24.12 (December 2024); batch, microbatch and virtual stages are
                      those of the table of 24.07 in its repository, which lists the same layouts
    A100              Llama 65B (arXiv:2302.13971, February 2023: 380 tokens/s on 2,048 GPUs with tensor and sequence
                      parallelism, 4M tokens a step, outputs of products kept); TinyLlama (its README and
                      pretrain/tinyllama.py, September 2023: 24,000 tokens/s on 16 A100 of 40 GB, FSDP)
    llm-foundry       its benchmarking README;  llm.c, KempnerForge: their own pages

Rows are tokens per second and GPU. The stacks differ from ours: eager or compiled, other attention, more recomputation,
with tp tokens cut between the layers. Each row says what it ran, and its stack is one of three (`Kernels`); the
planner's constants are the same for all. The A100 runs of 2023 were eager torch, before torch.compile and (Llama)
FlashAttention-2, which is `plain`; the tp x fsdp of Llama 65B is not published, one node and all others are assumed.
"""

from typing import Any

import msgspec

from cairn.models.presets import preset
from cairn.models.spec import ModelSpec
from cairn.plan.device import device
from cairn.plan.train_cost import Choice, Job, Kernels, step_time
from cairn.train.parallel.layout import Layout, Order
from cairn.train.recompute_kinds import Recompute


class Published(msgspec.Struct, frozen=True, kw_only=True):
    what: str
    gpu: str
    model: str
    sequence: int
    microbatch: int
    tokens_per_s: float  # of one GPU
    layout: Layout
    microbatches: int = 1
    recompute: Recompute = "none"
    products_again: float = 0.0  # share of the products that backward computes again
    order: Order = "1f1b"
    chunks: int = 2
    kernels: Kernels = "fused"
    fp8: bool = False
    tensor_overlap: bool = False
    whole_gradients: bool = False


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
        preset("gpt2-xl"),
        vocab=50_368,
        hidden=hidden,
        layers=layers,
        heads=hidden // 128,
        kv_heads=hidden // 128,
        head_dim=128,
        intermediate=4 * hidden,
        context=8192,
    )


TITAN_AGAIN = 0.5  # torchtitan's "selective" computes every second product of a layer again
MODELS = {
    "mpt-760m": mpt(1536, 24),
    "mpt-1.3b": mpt(2048, 24),
    "mpt-2.65b": mpt(2560, 32),
    "mpt-6.7b": mpt(4096, 32),
    "llama-3.1-405b": msgspec.structs.replace(
        preset("llama-3.1-70b"), hidden=16_384, layers=126, heads=128, intermediate=53_248
    ),
}

_FSDP8, _FSDP4 = Layout(fsdp=8), Layout(fsdp=4)


def _mpt(model: str, sequence: int, microbatch: int, tokens: float, **rest: Any) -> Published:
    """llm-foundry's benchmarking README: FSDP, no compiler."""
    fp8 = " fp8" if rest.get("fp8") else ""
    layout = rest.get("layout", _FSDP8)
    fixed: dict[str, Any] = {
        "what": f"{model}{fp8} seq {sequence} x {microbatch}, llm-foundry, {layout.world()}xH100",
        "gpu": "h100",
        "model": model,
        "sequence": sequence,
        "microbatch": microbatch,
        "tokens_per_s": tokens,
        "layout": layout,
        "kernels": "plain",
        "microbatches": 2,
    }
    return Published(**(fixed | rest))


def _titan(what: str, microbatch: int, tokens: float, layout: Layout, **rest: Any) -> Published:
    """torchtitan's tables: 8,192 tokens, compiled; its "selective" repeats every second product of a layer."""
    fixed: dict[str, Any] = {
        "what": f"{what}, torchtitan, {layout.words()}",
        "gpu": "h100-500w",
        "model": "llama-3.1-8b",
        "sequence": 8192,
        "microbatch": microbatch,
        "tokens_per_s": tokens,
        "layout": layout,
        "kernels": "compiled",
    }
    if rest.get("recompute") is None:
        fixed |= {"recompute": "selective", "products_again": TITAN_AGAIN}
    return Published(**(fixed | rest))


def _megatron(
    model: str,
    tokens: float,
    layout: Layout,
    microbatches: int,
    stack: str = "Megatron-Bridge",
    **rest: Any,
) -> Published:
    """Megatron-Bridge's or NeMo's performance summary: DGX H100, fp8, 8,192 tokens, one sample at a time.

    Their recipes switch tp_comm_overlap on.
    """
    fixed: dict[str, Any] = {
        "what": f"{model} fp8 seq {rest.get('sequence', 8192)}, {stack}, {layout.words()}",
        "gpu": "h100",
        "model": model,
        "sequence": 8192,
        "microbatch": 1,
        "tokens_per_s": tokens,
        "layout": layout,
        "microbatches": microbatches,
        "fp8": True,
        "tensor_overlap": layout.tp > 1,
    }
    return Published(**(fixed | rest))


_4096: dict[str, Any] = {"stack": "NeMo", "sequence": 4096, "order": "interleaved"}
_70B: dict[str, Any] = {"model": "llama-3.1-70b"}
_405B: dict[str, Any] = {"model": "llama-3.1-405b"}
_FULL: dict[str, Any] = {"recompute": "full", "fp8": True}

ROWS = (
    _titan("Llama-3 8B", 2, 6667, _FSDP8),
    _titan("Llama-3 8B eager", 2, 5762, _FSDP8, kernels="plain"),
    _titan("Llama-3 8B fp8", 2, 8532, _FSDP8, fp8=True),
    _titan("Llama-3 8B", 2, 6514, Layout(fsdp=128)),
    _titan("Llama-3 8B eager", 2, 5605, Layout(fsdp=128), kernels="plain"),
    _titan("Llama-3 8B fp8", 2, 8380, Layout(fsdp=128), fp8=True),
    _titan("Llama-3 8B fp8 H200", 2, 10938, Layout(fsdp=32), fp8=True, gpu="h200"),
    _titan("Llama-3 8B fp8 H200", 2, 10753, Layout(fsdp=64), fp8=True, gpu="h200"),
    _titan("Llama-3 8B fp8 seq 32768", 1, 3890, _FSDP8, sequence=32768, **_FULL),
    _titan("Llama-3 8B fp8 seq 65536", 1, 2540, Layout(fsdp=4, cp=2), sequence=65536, **_FULL),
    _titan("Llama-3 8B fp8 seq 131072", 1, 1071, Layout(fsdp=2, cp=4), sequence=131072, **_FULL),
    _titan("Llama-3 8B fp8 seq 262144", 1, 548, Layout(cp=8), sequence=262144, **_FULL),
    _titan("Llama-3 70B fp8", 16, 829, Layout(fsdp=32, tp=8), **_70B, **_FULL),
    _titan(
        "Llama-3 405B fp8 1f1b",
        1,
        100,
        Layout(fsdp=8, pp=8, tp=8),
        microbatches=32,
        **_405B,
        **_FULL,
    ),
    _titan(
        "Llama-3 405B fp8 interleaved",
        1,
        128,
        Layout(fsdp=8, pp=8, tp=8),
        microbatches=32,
        order="interleaved",
        **_405B,
        **_FULL,
    ),
    _titan("Llama-3 8B seq 8192 x 1, torchao", 1, 6150, _FSDP8),
    _titan("Llama-3 8B fp8 seq 8192 x 1, torchao", 1, 7690, _FSDP8, fp8=True),
    _megatron("llama-3.1-8b", 14451, _FSDP8, 16),
    _megatron("llama-3.1-70b", 1621, Layout(dp=2, pp=8, tp=4), 128, order="interleaved", chunks=5),
    _megatron(
        "llama-3.1-405b", 311, Layout(dp=8, pp=8, cp=2, tp=8), 192, order="interleaved", chunks=8
    ),
    _megatron("llama-2-7b", 16934, Layout(dp=8), 16, stack="NeMo", sequence=4096),
    _megatron("llama-2-13b", 8715, Layout(dp=4, pp=4), 32, chunks=10, **_4096),
    _megatron("llama-2-70b", 1728, Layout(dp=4, pp=4, tp=4), 32, chunks=20, **_4096),
    _megatron("llama-3.1-8b", 12273, Layout(dp=4, cp=2), 32, stack="NeMo"),
    Published(
        what="Llama 65B seq 2048 x 8, Meta, 2048xA100",
        gpu="a100",
        model="llama-65b",
        sequence=2048,
        microbatch=8,
        tokens_per_s=380,
        layout=Layout(fsdp=256, tp=8),
        recompute="selective",
        kernels="plain",
    ),
    Published(
        what="TinyLlama 1.1B seq 2048 x 8, 16xA100 40 GB",
        gpu="a100-40gb",
        model="tinyllama-1.1b",
        sequence=2048,
        microbatch=8,
        microbatches=8,
        tokens_per_s=24_000,
        layout=Layout(fsdp=16),
        kernels="plain",
        whole_gradients=True,
    ),
    Published(
        what="Qwen3 30B-A3B seq 4096 x 4, NeMo AutoModel, 8xH100",
        gpu="h100",
        model="qwen3-30b-a3b",
        sequence=4096,
        microbatch=4,
        microbatches=16,
        tokens_per_s=12_040,
        layout=Layout(fsdp=8, ep=8),
        recompute="full",
    ),
    Published(
        what="Llama-3 8B seq 4096 x 4, KempnerForge, FSDP on 4xH200",
        gpu="h200",
        model="llama-3.1-8b",
        sequence=4096,
        microbatch=4,
        microbatches=2,
        tokens_per_s=9746,
        layout=_FSDP4,
        recompute="full",
    ),
    Published(
        what="Llama-3 8B seq 4096 x 4, KempnerForge, TP on 4xH200",
        gpu="h200",
        model="llama-3.1-8b",
        sequence=4096,
        microbatch=4,
        microbatches=2,
        tokens_per_s=6284,
        layout=Layout(tp=4),
        recompute="full",
    ),
    _mpt("mpt-760m", 2048, 24, 63_100),
    _mpt("mpt-760m", 2048, 24, 68_600, layout=Layout(fsdp=16)),
    _mpt("mpt-1.3b", 2048, 14, 45_500),
    _mpt("mpt-1.3b", 4096, 7, 38_500),
    _mpt("mpt-1.3b", 8192, 3, 29_200),
    _mpt("mpt-1.3b", 8192, 3, 32_000, fp8=True),
    _mpt("mpt-2.65b", 1024, 20, 27_000),
    _mpt("mpt-2.65b", 4096, 5, 21_000),
    _mpt("mpt-2.65b", 8192, 3, 16_600),
    _mpt("mpt-2.65b", 2048, 10, 30_600, fp8=True),
    _mpt("mpt-2.65b", 8192, 3, 19_100, fp8=True),
    _mpt("mpt-6.7b", 2048, 6, 10_600),
    _mpt("mpt-6.7b", 4096, 16, 8_600, recompute="full"),
    Published(
        what="GPT-2 124M seq 1024 x 64, llm.c, 8xH100",
        gpu="h100",
        model="gpt2",
        sequence=1024,
        microbatch=64,
        tokens_per_s=468_000,
        layout=Layout(dp=8),
    ),
    Published(
        what="GPT-2 1558M seq 1024 x 16, llm.c, 8xH100",
        gpu="h100",
        model="gpt2-xl",
        sequence=1024,
        microbatch=16,
        microbatches=8,
        tokens_per_s=46_800,
        layout=Layout(dp=8),
    ),
)


def compare() -> list[Compared]:
    return [compare_one(row) for row in ROWS]


def compare_one(row: Published) -> Compared:
    spec = MODELS[row.model] if row.model in MODELS else preset(row.model)
    job = Job(
        spec=spec,
        sequence=row.sequence,
        fp8=row.fp8,
        kernels=row.kernels,
        sequences=row.microbatch * row.microbatches * row.layout.data_ranks(),
    )
    choice = Choice(
        layout=row.layout,
        microbatch=row.microbatch,
        recompute=row.recompute,
        order=row.order,
        chunks=row.chunks,
        sequence_parallel=row.layout.tp > 1,
        whole_gradients=row.whole_gradients or row.layout.pp > 1,  # torch's pipelines do so
        tensor_overlap=row.tensor_overlap,
    )
    time = step_time(job, choice, device(row.gpu))
    seconds = time.total() + row.products_again * time.products / 3
    rate = job.sequence * job.sequences / seconds / row.layout.world()
    return Compared(what=row.what, measured=row.tokens_per_s, predicted=rate)
