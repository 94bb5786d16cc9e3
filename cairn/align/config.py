"""Everything that decides a run of reinforcement learning: a training recipe with a task, rollouts and an algorithm.

`data.sequences` answers are learnt from in each step, `rollout.group` of them to one prompt; an answer with its prompt
has at most `data.sequence` tokens. Unknown keys are refused. No torch.
"""

from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

import msgspec

from cairn.core.errors import ConfigError
from cairn.core.shared_secret import is_loopback
from cairn.train.config import Amount, Count, Positive, Rate, Share, Train

Kind = Literal["grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo", "ppo"]
# Clips of the ratio, below and above 1, where the recipe names none: those of the papers.
CLIPS: dict[str, tuple[float, float]] = {
    "dapo": (0.2, 0.28),
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 4.0),
}


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Problems whose answers a program can check."""

    kind: Literal[
        "sorting", "arithmetic", "largest", "countdown", "format", "calculator", "python"
    ] = "sorting"
    """sorting: digits in order; arithmetic: sums in words; largest: which of some numbers it is; countdown: reach a
    number with given ones; format: a sum, answered between <answer> and </answer>; calculator: a product, with a tool
    that works out what stands between <calc> and </calc>; python: the same with programs between <python> and
    </python>, run in a sandbox"""
    numbers: Annotated[int, msgspec.Meta(ge=2, le=9)] = 4
    """how many numbers a problem of sorting, largest or countdown has"""
    turns: Positive = 2
    """calls of a tool in one answer at most"""
    held_out: Positive = 64
    """problems that are never trained on, each answered once to see what was learnt"""
    every: Count = 20
    """steps between two such measurements; 0: only before and after"""


class Rollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling of answers, at temperature 1, because that is the policy being trained."""

    group: Annotated[int, msgspec.Meta(ge=2)] = 8
    """answers to each prompt, which are compared with each other"""
    max_tokens: Positive = 24
    """of an answer; a longer one is cut, and is wrong"""
    consistent: bool = False
    """the batch-invariant engine says how likely what is learnt from is, so that the mismatch is exactly 0; slower"""
    engines: list[str] = []
    """servers that sample (http://HOST:PORT, by `cairn serve MODEL --admin-endpoints --weights float`); the weights
    are sent to them before every round. None: the engine of this process, which reads the weights where they lie"""
    listen: str = "127.0.0.1"
    """address of this machine that those servers fetch weights from; off loopback CAIRN_JOB_SECRET has to be set on
    both sides"""
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 600.0
    """how long an answer or an update of theirs may take"""
    shared_prompts: bool = True
    """in training, a prompt is computed once for all of its answers; off: once for each, with the same gradients"""
    updates: Positive = 1
    """steps that learn from one round of rollouts; the later ones are off policy"""

    def __post_init__(self) -> None:
        if _is_wildcard(self.listen):
            raise ConfigError(
                f"rollout.listen is {self.listen!r}, which is no address that a server could fetch weights from",
                hint="name the address of this machine that the servers can reach",
            )
        for url in self.engines:
            host = _host_of(url)
            if is_loopback(self.listen) and not is_loopback(host):
                raise ConfigError(
                    f"rollout.engines has {url}, and rollout.listen is {self.listen}, which only this machine reaches",
                    hint="set rollout.listen to the address of this machine that the servers can reach",
                )


def _is_wildcard(host: str) -> bool:
    try:
        return not host or ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def _host_of(url: str) -> str:
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return parts.hostname
    except ValueError:  # a port that is no number, or brackets that do not close
        pass
    raise ConfigError(f"rollout.engines has {url!r}", hint="it has to be http://HOST:PORT")


class Algorithm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Policy-gradient algorithm."""

    kind: Kind = "dr_grpo"
    """grpo: rewards less the mean over the standard deviation of the group; dr_grpo: less the mean, over a constant
    length; rloo: less the mean of the others; dapo: over all tokens, with a wider clip above, and without groups whose
    answers are all alike; gspo: one ratio for an answer; cispo: every token pushes; ppo: a value head says what each
    token was expected to earn, and no answer is compared with others"""
    clip_low: Amount = 0.0
    """how far below 1 the ratio to the sampling policy counts; 0: as the paper has it"""
    clip_high: Amount = 0.0
    kl: Amount = 0.0
    """weight of the divergence from the model that the run began with"""
    value_weight: Amount = 0.1
    """ppo: of the value head's loss beside the policy's"""
    value_lr: Rate = 1e-2
    """ppo: learning rate of the value head"""
    gae_lambda: Share = 0.95
    """ppo: how far back a surprise is credited; 1: to the first token, 0: to its own alone"""


class Align(Train, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Reinforcement learning on tasks that a program can check: RECIPE is a name (tiny-sort) or a TOML file.

    `cairn align RECIPE --print` writes the recipe as TOML; edit it and run `cairn align my.toml`. `--lora [RANK]`
    trains a low-rank adapter in place of the weights of `model.checkpoint`. The engine that samples reads the weights
    that are trained, where they lie: there is one copy of them.
    """

    verb: ClassVar[str] = "cairn align"

    task: Task = Task()
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    talk: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    """port of this machine where the model can be talked to while it learns, and where its page is; 0: none"""
    warm_up: Count = 0
    """at most so many steps on written answers before the first rollout, for a model that begins with random weights"""
    warm_up_until: Share = 0.3
    """the warm-up ends when sampled answers have this reward"""
    warm_up_lr: Rate = 3e-3
    """learning rate of the warm-up; that of rollouts is optim.lr"""
    warm_up_mistakes: Share = 0.0
    """share of the written answers that are wrong: the model imitates mistakes, too, until rewards tell them apart"""

    def __post_init__(self) -> None:
        if self.parallel.world() > 1:
            raise ConfigError(
                f"the layout {self.parallel.words()} has {self.parallel.world()} processes",
                hint="the engine reads the weights of its own process: use one",
            )
        _check_unused(self)
        super().__post_init__()
        if self.data.sequences % self.rollout.group:
            raise ConfigError(
                f"data.sequences {self.data.sequences} is no multiple of rollout.group {self.rollout.group}",
                hint="every prompt has a whole group of answers",
            )
        if self.rollout.engines and (self.adapter.rank or self.rollout.consistent):
            raise ConfigError(
                f"rollout.engines with adapter.rank {self.adapter.rank}, rollout.consistent "
                f"{self.rollout.consistent}: whole weights are sent, and other machines round in their own way",
                hint="leave rollout.engines out, or train the weights themselves",
            )
        if self.rollout.max_tokens >= self.data.sequence:
            raise ConfigError(
                f"rollout.max_tokens {self.rollout.max_tokens} leaves no room for a prompt in data.sequence "
                f"{self.data.sequence}",
                hint="make data.sequence larger",
            )
        if self.algorithm.kl and not self.adapter.rank and self.model.checkpoint is None:
            raise ConfigError(
                f"algorithm.kl is {self.algorithm.kl:g}, and this run begins with random weights",
                hint="name model.checkpoint, or set algorithm.kl = 0",
            )

    @property
    def clip(self) -> tuple[float, float]:
        low, high = CLIPS.get(self.algorithm.kind, (0.2, 0.2))
        return self.algorithm.clip_low or low, self.algorithm.clip_high or high


# Settings of `cairn train` that a run of reinforcement learning has no use for; a name without a dot is a table.
UNUSED = (
    *("data.sources", "data.weights", "data.tokenizer", "data.field", "data.vocab"),
    *("data.document_mask", "data.too_long", "model.vocab", "precision.z_loss"),
    *("objective", "distill", "validation", "parallel", "strategy", "recovery"),
)


def _check_unused(config: Align) -> None:
    """Refuse what would be ignored: a run on another data set than the one that was named would look like a success."""
    default, changed = Train(), []
    for name in UNUSED:
        table, _, field = name.partition(".")
        ours, usual = getattr(config, table), getattr(default, table)
        for key in (field,) if field else ours.__struct_fields__:
            if (value := getattr(ours, key)) != getattr(usual, key):
                shown = str(value) if isinstance(value, Path) else value
                changed.append(f"{table}.{key} is {shown!r}")
    if changed:
        them = "it" if len(changed) == 1 else "them"
        raise ConfigError(
            f"{', '.join(changed)}: cairn align does not use {them}",
            hint=f"leave {them} out: [task] makes the problems, task.held_out measures, and one process trains; "
            "cairn train and cairn tune learn from data",
        )
