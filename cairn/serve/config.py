"""Engine configuration: one class for Python, the command line, TOML and the environment.

Names and meanings are those that vLLM's users know. None or "auto": chosen from the model and the machine, and said.
"""

from typing import Annotated, Any, Literal

import msgspec
import tyro

from cairn.core.errors import ConfigError
from cairn.models.linear.registry import FORMS, NAMES
from cairn.models.quantized.scheme import ALIASES, GGUF, METHODS
from cairn.serve.engine.request import MOST_DRAFTS

MOST_RANKS = 8  # that share a model: GPUs of one machine
SPECULATE = "ngram, suffix, grammar, mtp, auto, off, a model or the folder of an EAGLE-3 head"
# What an engine without clients of its own, such as one for drafts, does not need: tiers of the cache, adapters, sleep.
NOT_SERVING: dict[str, Any] = {
    "kv_offload_host": None,
    "kv_offload_disk": None,
    "kv_offload_share": None,
    "kv_offload_peers": None,
    "max_loras": 0,
    "lora_room": 0,
    "enable_sleep_mode": False,
}
# What other engines take under names that are not here, and what does it instead.
INSTEAD = {
    "seed": "SamplingParams(seed=...) makes an answer repeat",
    "tokenizer": "the tokenizer is the one beside the weights",
    "trust_remote_code": "leave it out: no code of a checkpoint is ever run",
    "enable_chunked_prefill": "leave it out: prompts always come in chunks of max_num_batched_tokens at most",
    "swap_space": "kv_offload_host=... keeps pages in host memory",
    "kv_offloading_backend": "leave it out: kv_offload_host is the host's memory, kv_offload_disk a folder behind it",
    "enable_hierarchical_cache": "kv_offload_host=... keeps pages in host memory",
    "hicache_size": "kv_offload_host=... says how many GiB",
    "cpu_offload_gb": "leave it out: a model has to fit; tensor_parallel_size shares it",
    "pipeline_parallel_size": "tensor_parallel_size shares a model between GPUs",
    "disable_log_stats": "leave it out: nothing is logged",
    "max_logprobs": "leave it out: logprobs may be up to 20",
    "speculative_config": "speculate='ngram', 'suffix' or a draft model, and draft_tokens=...",
    "speculative_model": "speculate=... takes ngram, suffix or a draft model",
    "num_speculative_tokens": "draft_tokens=... says how many",
    "revision": "download that revision, and give its folder",
    "download_dir": "HF_HOME says where models are kept",
}


class RoleConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Role of an engine in a disaggregated prefill and decode pair; see `serve/separation`."""

    role: Literal["both", "prefill", "decode"]
    transport: str = "tcp"  # of pages
    host: str = "127.0.0.1"  # address on which pages are offered
    prefill_urls: list[str] = []
    prefill_min_tokens: int = 128
    prefill_when: Literal["pays", "always"] = "pays"
    prefill_timeout_s: float = 60.0


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    """a folder, a GGUF file, a name on the hub, or random:SHAPE"""
    device: str = "auto"
    """cpu, cuda or cuda:1"""
    dtype: str = "auto"
    """bfloat16, float16 or float32"""
    weights: str = "auto"
    """form of the weights: float (exact), fp8, w8a16, w4a16 and nvfp4 (dense models), mxfp4 (experts), on a CPU int8,
    int4 or packed; auto: as few bits as the file has"""
    quantization: str | None = None
    """format that the checkpoint has to have: awq, gptq, compressed-tensors, fp8, mxfp4, modelopt or gguf; a checkpoint
    in floating point is quantised by fp8, w8a16, w4a16 and nvfp4. Default: what its config.json says"""
    generation_config: str = "auto"
    """default sampling parameters of requests: auto (those in the model's generation_config.json, or in a GGUF file's
    general.sampling over llama.cpp's defaults) or vllm (the API's own defaults)"""
    head: str = "auto"
    """form of the output projection: auto (as the weights are stored) or 8bit (float8 rows, on a GPU)"""
    kv_cache_dtype: Annotated[str, tyro.conf.arg(aliases=["--kv-cache"])] = "auto"
    """type of keys and values: auto (the model's) or fp8, with scales of the checkpoint or of the first prompts"""
    max_model_len: int | Literal["auto"] | None = None
    """longest request, prompt and answer together; default and at most: what the model was made for (more is said, and
    cut to it); auto: so long that several of them fit into the cache"""
    context: int | None = None
    """tokens that the model sees; more than it was trained for stretches its positions by YaRN"""
    max_num_seqs: int | None = None
    """most requests that run at once; default: 512 on a GPU, 256 on a CPU"""
    max_loras: int = 0
    """adapters that stay on the device; more may be loaded, those used last stay, the others wait on the host; 0: all
    of them"""
    lora_room: int = 0
    """on a GPU, reserve room behind the weights for so many adapters of rank 16 or less (1, 8, 32 or 64, rounded up;
    about half of an adapter's size each), so that steps of many requests need one kernel less for each map; 0: none"""
    max_num_batched_tokens: int | None = None
    """most tokens computed in one step"""
    step_ms: float = 0.0
    """milliseconds that a step should take while requests decode: long prompts are spread over more steps instead of
    delaying answers; 0: no limit. On a CPU all steps are limited, and the limit is at least 250"""
    gpu_memory_utilization: float = 0.9
    """share of the GPU's memory to use; on a CPU, a tenth of that share of the machine's"""
    num_gpu_blocks_override: int | None = None
    """pages of the cache, instead of as many as fit"""
    block_size: int | None = None
    """tokens of a page: 16, 32, 64, 128 or 256"""
    enable_prefix_caching: bool = True
    """share pages between requests that begin alike"""
    kv_offload_host: Annotated[str | None, tyro.conf.arg(aliases=["--kv-offloading-size"])] = None
    """pinned host memory for pages that leave the prefix cache, such as 8GiB (a bare number counts GiB); they come
    back where loading them is faster than computing them"""
    kv_offload_disk: str | None = None
    """behind it, a folder for pages as DIR:SIZE, such as /data/kv:100GiB, or an object store as URL:SIZE, such as
    s3://bucket/kv:100GiB; the next server of the model finds them"""
    kv_offload_share: str | None = None
    """HOST:PORT where other servers of the model fetch pages of this one's host memory; port 0 takes a free one"""
    kv_offload_peers: str | None = None
    """in place of a disk, such servers as HOST:PORT,HOST:PORT; pages are fetched where computing them takes longer"""
    cache_groups: bool = True
    """layers with a window free the pages behind it; off: every layer keeps every token"""
    scheduling_policy: str = "fcfs"
    """fcfs: in order of arrival; shortest: short prompts first; priority: the same as fcfs, because the priority of a
    request always counts"""
    long_prefill_token_threshold: int = 0
    """most prompt tokens of one request in a step; 0: only the budget of the step counts"""
    enforce_eager: bool = False
    """no CUDA graphs"""
    plain: bool = False
    """the plain forms of everything: no overlap, no graphs, no fused kernels"""
    batch_invariant: bool = False
    """the same tokens at temperature 0, whatever else is in the batch"""
    tensor_parallel_size: int = 1
    """GPUs (or processes on a CPU) that share the model"""
    enable_expert_parallel: bool = False
    """with tensor_parallel_size: whole experts on each rank, instead of a slice of every expert"""
    speculate: str = "off"
    """guess several tokens and verify them in one step, with the same answers: ngram (what followed the last tokens
    before), suffix (what most often did, in finished answers too), grammar (only what a schema leaves no choice
    about), mtp (the layer of the checkpoint that predicts further tokens), a smaller MODEL with the same tokens, a
    folder with an EAGLE-3 head, auto (suffix) or off"""
    draft_tokens: int | Literal["auto"] = "auto"
    """most guesses of a request in a step; auto: as many as are expected to save time (a head: 3)"""
    kernel_cache: str | None = None
    """folder of kernels that `cairn kernels build` compiled ahead, for a GPU; default: what CAIRN_KERNEL_CACHE says.
    What it lacks is compiled when first needed"""
    enable_sleep_mode: bool = False
    """on one GPU: POST /sleep gives the memory back and /wake_up takes it again, in place of loading; a CPU needs no
    flag for it"""
    load_in_advance: bool = False
    """capture all common graphs before the first request, instead of when first needed; LLM and the server do"""

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_names()
        self._check_quantization()
        self._check_offload()
        drafts = self.draft_tokens
        fine = drafts == "auto" or 1 <= drafts <= MOST_DRAFTS
        _check("draft_tokens", drafts, fine, f"auto, or from 1 to {MOST_DRAFTS}")
        _check("speculate", self.speculate or "empty", bool(self.speculate), SPECULATE)
        is_known = self.scheduling_policy in ("fcfs", "priority", "shortest")
        _check("scheduling_policy", self.scheduling_policy, is_known, "fcfs, priority or shortest")

    def _check_sizes(self) -> None:
        fine = 0 < self.gpu_memory_utilization <= 1
        _check("gpu_memory_utilization", self.gpu_memory_utilization, fine, "above 0, at most 1")
        for name in (
            "max_model_len",
            "context",
            "max_num_seqs",
            "max_num_batched_tokens",
            "block_size",
            "num_gpu_blocks_override",
            "tensor_parallel_size",
        ):
            value = getattr(self, name)
            _check(name, value, value in (None, "auto") or value >= 1, "at least 1")
        # Before any process is started for a rank.
        fine = self.tensor_parallel_size <= MOST_RANKS
        _check("tensor_parallel_size", self.tensor_parallel_size, fine, f"at most {MOST_RANKS}")
        longest = self.long_prefill_token_threshold
        _check("long_prefill_token_threshold", longest, longest >= 0, "0 or more")
        _check("max_loras", self.max_loras, self.max_loras >= 0, "0 or more")
        _check("lora_room", self.lora_room, 0 <= self.lora_room <= 64, "0 to 64")
        _check("step_ms", self.step_ms, 0 <= self.step_ms < 1e6, "0 or more")

    def _check_names(self) -> None:
        """Settings that are one of a few words; a dtype gets the name that torch has for it."""
        dtype = {"half": "float16", "float": "float32"}.get(self.dtype, self.dtype)
        msgspec.structs.force_setattr(self, "dtype", dtype)
        types = ("auto", "bfloat16", "float16", "float32")
        _check("dtype", self.dtype, self.dtype in types, "auto, bfloat16, float16 or float32")
        sizes = (None, 16, 32, 64, 128, 256)
        _check("block_size", self.block_size, self.block_size in sizes, "16, 32, 64, 128 or 256")
        _check("weights", self.weights, self.weights in NAMES, f"one of {', '.join(NAMES)}")
        caches = ("auto", "fp8", "fp8_e4m3")
        _check("kv_cache_dtype", self.kv_cache_dtype, self.kv_cache_dtype in caches, "auto or fp8")
        _check("head", self.head, self.head in ("auto", "8bit"), "auto or 8bit")
        fine = self.generation_config in ("auto", "vllm")
        _check("generation_config", self.generation_config, fine, "auto or vllm")

    def _check_offload(self) -> None:
        offloads = self.kv_offload_disk is None or self.kv_offload_host is not None
        rule = "given with kv_offload_host: pages pass through it"
        _check("kv_offload_disk", self.kv_offload_disk, offloads, rule)
        for name in ("kv_offload_share", "kv_offload_peers"):
            setting = getattr(self, name)
            _check(name, setting, setting is None or self.kv_offload_host is not None, rule)
        alone = self.kv_offload_peers is None or self.kv_offload_disk is None
        _check("kv_offload_peers", self.kv_offload_peers, alone, "given without kv_offload_disk")

    def _check_quantization(self) -> None:
        """Under the name that checkpoints have for it, whatever kernel another engine names."""
        if self.quantization is None:
            return
        method = ALIASES.get(self.quantization, self.quantization)
        methods = tuple(dict.fromkeys((*METHODS, GGUF, *FORMS)))
        _check("quantization", method, method in methods, f"one of {', '.join(methods)}")
        msgspec.structs.force_setattr(self, "quantization", method)


def _check(name: str, value: object, fine: bool, rule: str) -> None:
    if not fine:
        raise ConfigError(f"{name} is {value}", hint=f"it has to be {rule}")
