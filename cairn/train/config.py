"""Everything that decides a training run, as one value: the same class is the TOML file and the flags.

    recipe (a name or a .toml) < environment < flags      ->      Train      ->      a checkpoint carries it along

Unknown keys are refused, and so is a pair of values that cannot work together, before anything is loaded. No torch.
"""

import shlex
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec

from cairn.core.errors import ConfigError
from cairn.train.config_checks import LARGEST, check_settings
from cairn.train.parallel.layout import Balance, Layout, Strategy
from cairn.train.recovery.settings import Recovery

Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=LARGEST)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=LARGEST)]


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model and its initial weights."""

    preset: str = "tiny-qwen3"
    """a shape: qwen3-0.6b, llama-3.1-8b, ...; not used with a checkpoint"""
    checkpoint: Path | None = None
    """begin with these weights instead of random ones: a folder, a GGUF file, cairn-tiny, or owner/name on the hub"""
    layers: Count = 0
    """number of layers; 0: that of the preset. The same holds for the sizes below"""
    hidden: Count = 0
    heads: Count = 0
    kv_heads: Count = 0
    head_dim: Count = 0
    intermediate: Count = 0
    vocab: Count = 0
    """0: the preset's; with a tokenizer of the data, the tokenizer's"""
    context: Count = 0
    frozen: list[str] = []
    """weights that keep their values, by name with * and ?: embedding.*, layers.0.*, *.attention.*; empty: none"""


class Data(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Training data."""

    sources: list[str] = msgspec.field(default_factory=lambda: ["stories"])
    """text, jsonl or parquet files or folders of them; token stores made by `cairn data tokenize`; procedural: stories,
    arithmetic, chats; or random, for timing"""
    weights: list[float] = []
    """how much of each source, in any unit; empty: alike"""
    tokenizer: Path | None = None
    """a folder with tokenizer.json; without it a small one is trained on text and on procedural sources"""
    field: str = "text"
    """the field of jsonl or the column of parquet files that holds the text"""
    vocab: Positive = 2048
    """tokens of a tokenizer that is trained on the way"""
    sequence: Positive = 256
    """tokens of a sample"""
    sequences: Positive = 8
    """samples of one step, all ranks together"""
    microbatch: Positive = 8
    """samples that a rank computes at once, at most all of its share; their gradients add up to those of the step"""
    document_mask: bool = True
    """a token sees only its own document"""
    too_long: Literal["refuse", "cut"] = "refuse"
    """what becomes of a chat that is longer than a sample"""


class Optim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Optimizer."""

    kind: Literal["adamw", "muon"] = "adamw"
    """muon: matrices inside the layers by Muon, all else by AdamW"""
    lr: Rate = 3e-4
    """Muon's updates are scaled to the size of AdamW's, so one rate serves both"""
    beta1: Share = 0.9
    beta2: Share = 0.95
    momentum: Share = 0.95
    """of Muon"""
    eps: Rate = 1e-8
    weight_decay: Amount = 0.1
    """of matrices; norms, biases and embeddings keep their size"""
    max_norm: Amount = 1.0
    """gradients longer than this are shortened to it; 0: never"""
    states: Literal["float32", "bfloat16", "int8"] = "float32"
    """what the optimizer remembers; bfloat16 is rounded at random, int8 has a scale for each block"""
    offload: bool = False
    """keep states and masters in the host's memory, and update there"""


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Learning-rate schedule."""

    kind: Literal["cosine", "wsd", "linear", "inverse_sqrt", "constant"] = "cosine"
    warmup: Count = 0
    """steps from 0 to the full rate"""
    final: Share = 0.1
    """what is left of the rate at the end"""
    decay: Share = 0.2
    """wsd: the last part of the run, in which the rate falls"""


class Precision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numerical precision, recomputation and offloading."""

    kind: Literal["float32", "bfloat16", "float16"] = "float32"
    """of weights and activations"""
    masters: bool = True
    """with 16 bits: a float32 copy of the weights that the optimizer updates"""
    fp8: Literal["none", "tensor", "row"] = "none"
    """products of the layers in 8 bits, with a scale for each tensor or each row"""
    recompute: Literal["auto", "none", "norms", "selective", "full"] = "none"
    """what backward computes again instead of keeping it: outputs of norms; of activations, too; whole layers; auto:
    as little as fits into the memory"""
    memory_gib: Amount = 0.0
    """with recompute auto or offload_activations: what may be taken of the device's memory; 0: nine tenths of all"""
    offload_activations: bool = False
    """activations that do not fit wait in the host's memory for backward; a GPU copies them beside its work"""
    offload_layers: Count = 0
    """with offload_activations: of so many layers; 0: of as few as the memory allows"""
    offload_gib: Amount = 0.0
    """with offload_activations: what may be taken of the host's memory; 0: half of all"""
    kernels: Literal["auto", "fused", "plain"] = "auto"
    """fused: our kernels; plain: torch, one operation after another; auto: fused on a GPU"""
    z_loss: Amount = 0.0
    """weight of the penalty on the size of the logits"""


class Qat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Training with rounded weights, so that the model that is served in few bits is the one that was trained."""

    scheme: Literal["none", "w4a16", "w8a8", "fp8", "mxfp4", "nvfp4"] = "none"
    """what products round to; the run then leaves a quantised checkpoint beside its model"""
    group: Count = 0
    """w4a16: weights that share a scale; 0: 128, or the largest of 64, 32, 16 that divides every row"""


class Distill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Learning from what another model expects, beside the right token."""

    teacher: str = ""
    """a model with the same tokenizer: a folder, a GGUF file, or owner/name; empty: no teacher"""
    top: Positive = 32
    """most likely tokens of the teacher that are compared; all others count as one"""
    weight: Share = 0.9
    """of the divergence from the teacher; the rest is cross entropy"""
    temperature: Rate = 1.0
    """of both distributions; above 1 the unlikely tokens count for more"""


class Adapter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A low-rank adapter that is trained in place of the weights, which stay as they are."""

    rank: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    """of the adapter's matrices; 0: no adapter, the weights are trained"""
    alpha: Rate = 32.0
    """the adapter counts alpha / rank"""
    targets: list[str] = msgspec.field(default_factory=lambda: ["all-linear"])
    """maps that get an adapter, by the end of their names: q_proj, v_proj, ...; all-linear: every one in the layers"""
    rslora: bool = False
    """the adapter counts alpha / sqrt(rank) instead"""
    dora: bool = False
    """train the length of each row beside the adapter"""
    base: Literal["float", "nf4"] = "float"
    """nf4: the frozen weights of the layers are kept in 4 bits (QLoRA)"""
    merge: bool = True
    """with checkpoint.export: leave the merged model beside the adapter"""


class Objective(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Training objective: text, or preferences between answers."""

    kind: Literal["sft", "dpo", "ipo", "kto", "orpo", "simpo", "reward"] = "sft"
    """sft: the next token (of chats, the assistant's words); the others: preferences, from .jsonl files in data.sources
    with prompt, chosen and rejected; kto: prompt, completion and label. orpo and simpo need no reference model. reward:
    a judge of answers, whose score is the log-probability of one more end token behind them"""
    beta: Amount = 0.0
    """how closely the policy is held to the reference; 0: as usual, which is 0.1, and 2 for simpo"""
    gamma: Amount = 1.0
    """simpo: by how much the chosen answer has to win"""
    weight: Amount = 0.1
    """orpo: of the odds beside the cross entropy"""
    center: Amount = 0.0
    """reward: how strongly scores are held around 0"""
    label_smoothing: Annotated[float, msgspec.Meta(ge=0, lt=0.5)] = 0.0
    """dpo: the share of labels that are taken to be wrong"""
    desirable: Amount = 1.0
    """kto: the weight of good answers"""
    undesirable: Amount = 1.0
    """kto: the weight of bad answers"""


class BadStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Handling of losses that are NaN, infinite, or far above recent ones."""

    action: Literal["skip", "rewind", "stop"] = "skip"
    spike: Amount = 0.0
    """a loss this many standard deviations above the recent mean is a spike; 0: only NaN and Inf"""
    window: Positive = 50
    """losses that make the recent mean"""
    most: Positive = 10
    """bad steps in a row after which the run stops, whatever the action"""


class Validation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Validation on held-out data."""

    share: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """part of the data that is kept apart for it; 0: all data is trained on"""
    sources: list[str] = []
    """other data to measure on, instead of a part of data.sources"""
    every: Count = 0
    """steps between two measurements; 0: only at the end"""
    batches: Positive = 1
    """steps' worth of samples (data.sequences each) that are measured, always the same ones"""
    serving_kl: bool = False
    """at every measurement, the KL between the model that trains and the one that a server would get"""
    prompts: list[str] = []
    """beginnings of texts that the model continues with its most likely tokens at every measurement"""
    tokens: Positive = 48
    """of such a continuation"""

    @property
    def on(self) -> bool:
        return bool(self.share or self.sources or self.prompts)


class Checkpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When the state of the run is written to disk, and what is left at its end."""

    every: Count = 100
    """steps between two checkpoints; 0: only at the end"""
    keep: Positive = 2
    """how many stay on disk"""
    in_background: bool = True
    """go on training while the files are written"""
    export: bool = True
    """at the end, write the weights as Hugging Face safetensors"""


class Log(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Log sinks besides log.jsonl and validation.jsonl in the run's folder."""

    every: Positive = 10
    """steps between two lines, in log.jsonl and on the console; a terminal shows a bar instead"""
    tensorboard: bool = False
    """write event files into the folder, if the package tensorboard is installed"""
    wandb: bool = False
    """send them to Weights & Biases, if the package wandb is installed"""


class Train(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Train or fine-tune a model: RECIPE is a name (tiny-cpu, qwen3-0.6b-1xh200, ...) or a TOML file.

    `cairn train RECIPE --print` writes the recipe as TOML; edit it and run `cairn train my.toml`. With --out FOLDER
    a run goes on from the newest complete checkpoint there. Short forms: --pp, --tp, --dp, --fsdp, --cp, --ep, --lr.
    """

    verb: ClassVar[str] = "cairn train"  # goes on with a run of this kind

    steps: Positive = 300
    """updates of the weights"""
    out: Path | None = None
    """folder of the run: checkpoints, log, report, model; a run in it is resumed. By default a new one in runs/"""
    seed: int = 0
    device: str = "auto"
    """cpu, cuda, cuda:N; auto takes a GPU where there is one"""
    model: Model = Model()
    data: Data = Data()
    optim: Optim = Optim()
    schedule: Schedule = Schedule()
    precision: Precision = Precision()
    qat: Qat = Qat()
    distill: Distill = Distill()
    adapter: Adapter = Adapter()
    objective: Objective = Objective()
    bad_step: BadStep = BadStep()
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    parallel: Layout = Layout()
    strategy: Strategy = Strategy()
    balance: Balance = Balance()
    recovery: Recovery = Recovery()

    def __post_init__(self) -> None:
        share, rest = divmod(self.data.sequences, max(self.parallel.data_ranks(), 1))
        if rest == 0 and self.data.microbatch > share:  # more ranks than the recipe was written for
            smaller = msgspec.structs.replace(self.data, microbatch=share)
            msgspec.structs.force_setattr(self, "data", smaller)
        check_settings(self)

    @property
    def folder(self) -> Path:
        if self.out is None:
            raise ConfigError("the run has no folder", hint="name one with --out")
        return self.out

    @property
    def resume_command(self) -> str:
        """Command that resumes the run, once its folder contains its recipe."""
        return f"{self.verb} --out {shlex.quote(str(self.folder))}"

    @property
    def microbatches(self) -> int:
        """Microbatches of a data rank per step."""
        return self.data.sequences // (self.parallel.data_ranks() * self.data.microbatch)

    @property
    def tokens_per_step(self) -> int:
        return self.data.sequences * self.data.sequence
