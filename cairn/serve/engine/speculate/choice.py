"""Creation of the drafter and of the draft-length policy from `--speculate` and `--draft-tokens`."""

import logging
from typing import TYPE_CHECKING, NamedTuple

from cairn.core.errors import ConfigError, ModelNotFound
from cairn.serve.engine.speculate.draft_model import open_draft_model
from cairn.serve.engine.speculate.drafter import Drafter
from cairn.serve.engine.speculate.grammar_tokens import GrammarDrafter
from cairn.serve.engine.speculate.head_pace import HeadPace
from cairn.serve.engine.speculate.ngram import NgramDrafter
from cairn.serve.engine.speculate.speculation import Speculation
from cairn.serve.engine.speculate.step_seconds import MeasuredSeconds, modelled_seconds
from cairn.serve.engine.speculate.suffix import SuffixDrafter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cairn.models.mtp import DraftHead, MtpHead
    from cairn.models.runnable import OpenModel, Runnable
    from cairn.models.transformer import Transformer
    from cairn.serve.config import EngineConfig
    from cairn.serve.engine.speculate.controller import Seconds

AUTO_DRAFTS = 7  # with the token before them, rows of 8
CPU_AUTO_DRAFTS = 15  # where rows are not padded: a long quote comes in fewer steps
HEAD_DRAFTS = 3  # each is a further pass of the head
CPU_HEAD_DRAFTS = 6  # where a pass is made only if its draft may be worth verifying
RANDOM_HEAD = "random:eagle3"  # to measure what a head costs
WAIT_S = 500e-6  # of the host for a step that verifies, on an H200, where nothing overlaps with it
# What a step that verifies takes longer on an H200: a part for each layer, and a share of a step without drafts. Fitted
# to 4 tokens of one row: 0.45 ms of Qwen3-8B (36 layers, 3.9 ms), 0.16 ms of Qwen3-0.6B (28 layers, 0.56 ms).
VERIFY_LAYER_S = 4e-6
VERIFY_SHARE = 0.08
MTP = "mtp"  # the layer of the model's own checkpoint that predicts further tokens
OWN_DRAFTERS = ("off", "grammar", "ngram", "suffix", "auto")
log = logging.getLogger("cairn")


class Chosen(NamedTuple):
    drafter: Drafter
    drafts: int  # most of a request in a step
    note: str
    on_device: bool = False  # the device drafts, and nothing waits for it
    head: "DraftHead | None" = None


def choose_drafter(
    config: "EngineConfig", target: "OpenModel", model: "Transformer"
) -> Chosen | None:
    """Create the drafter, or None. Draft models and heads are loaded here, before free memory is measured."""
    if config.speculate == "off":
        return None
    if (head := open_head(config, target, model)) is not None:
        paced = _is_paced(config, model)
        drafts = CPU_HEAD_DRAFTS if paced else HEAD_DRAFTS
        drafts = drafts if config.draft_tokens == "auto" else config.draft_tokens
        is_own = config.speculate == MTP
        who = "the checkpoint's own MTP layer" if is_own else f"the head {config.speculate}"
        many = f"up to {drafts}, as many as are expected to save time," if paced else f"{drafts}"
        note = f"drafts: what {who} guesses; {many} in a step"
        return Chosen(GrammarDrafter(), drafts, note, True, head)
    on_gpu = model.embedding.weight.is_cuda
    auto = config.draft_tokens == "auto"
    most = AUTO_DRAFTS if on_gpu else CPU_AUTO_DRAFTS
    drafts = most if config.draft_tokens == "auto" else config.draft_tokens
    drafter, what = _drafter(config, target)
    many = f"up to {drafts}, as many as are expected to save time" if auto else f"up to {drafts}"
    on_device = on_gpu and config.speculate == "ngram" and not config.plain
    return Chosen(drafter, drafts, f"drafts: {what}; {many}, in a step", on_device)


def _is_paced(config: "EngineConfig", model: "Transformer") -> bool:
    """Is a head turned off where it does not pay? With a number of drafts that was given, and on a GPU, it runs."""
    on_cpu = not model.embedding.weight.is_cuda
    return on_cpu and model.build.shards.size == 1 and config.draft_tokens == "auto"


def _drafter(config: "EngineConfig", target: "OpenModel") -> tuple[Drafter, str]:
    """Whatever else drafts, what a grammar leaves no choice about comes first."""
    match config.speculate:
        case "grammar":
            return GrammarDrafter(), "what a grammar leaves no choice about"
        case "ngram":
            others, what = NgramDrafter(), "what followed the last tokens before (n-gram)"
        case "suffix" | "auto":
            others, what = SuffixDrafter(), "what most often followed the last tokens (suffix)"
        case name:
            others, what = open_draft_model(config, target), f"what {name} would say"
    return GrammarDrafter(others), what


def open_head(
    config: "EngineConfig", target: "OpenModel", model: "Transformer"
) -> "DraftHead | None":
    """The head that `config.speculate` names, on the model's device; None: it names none."""
    name = config.speculate
    if name in OWN_DRAFTERS or (name.startswith("random:") and name != RANDOM_HEAD):
        return None
    if name == MTP:
        return _own_layer(config, target, model)
    from cairn.models.build import ModelBuild
    from cairn.models.eagle import is_eagle, load_head, random_head
    from cairn.models.hub import resolve
    from cairn.models.safetensors_file import read_json

    try:
        folder = None if name == RANDOM_HEAD else resolve(name)
    except ModelNotFound as problem:
        raise ConfigError(
            f"speculate is {name}, which names no drafter, and as a model or a head: {problem.message}",
            hint=f"use {', '.join((*OWN_DRAFTERS, MTP))}, a model of the same tokens, or an EAGLE-3 head",
        ) from problem
    described = None if folder is None else folder / "config.json"
    if described is not None and not (described.is_file() and is_eagle(read_json(described))):
        return None
    _check_head(config, model)
    weight = model.embedding.weight
    build = ModelBuild(weight.device, weight.dtype, fused=weight.is_cuda)
    spec = target.spec
    return random_head(spec, build) if folder is None else load_head(folder, spec, build)


def _own_layer(config: "EngineConfig", target: "OpenModel", model: "Transformer") -> "MtpHead":
    from cairn.models.mtp import load_mtp

    if target.checkpoint is None:
        raise ConfigError(
            f"speculate is mtp, and {target.name} is no checkpoint that could have such a layer",
            hint="use --speculate ngram",
        )
    _check_head(config, model)
    return load_mtp(target.checkpoint.tensors, model)


def _check_head(config: "EngineConfig", model: "Transformer") -> None:
    """Raise for features that a draft head does not support; an MTP head may use latent attention."""
    spec = model.spec
    obstacles = {
        "tensor parallelism": model.build.shards.size > 1,
        "windows": any(spec.windows),
        "latent attention": bool(spec.latent) and config.speculate != MTP,
        "a state in some layers": spec.is_recurrent,
        "a float8 cache": config.kv_cache_dtype != "auto",
        "batch_invariant on a CPU": config.batch_invariant and not model.embedding.weight.is_cuda,
    }
    for what, given in obstacles.items():
        if given:
            raise ConfigError(
                f"speculate is {config.speculate}, a head, and there is {what}",
                hint="use --speculate ngram",
            )


def make_speculation(
    chosen: Chosen, config: "EngineConfig", runnable: "Runnable", widths: "Sequence[int]"
) -> Speculation:
    """`widths`: of rows in CUDA graphs; none on a CPU."""
    model = runnable.model
    ranks, on_gpu = model.build.shards.size, model.embedding.weight.is_cuda
    chooses = config.draft_tokens == "auto" and chosen.head is None
    paced = chosen.head is not None and _is_paced(config, model)
    seconds = _seconds(runnable, ranks, config.batch_invariant) if chooses else None
    wait_s = 0.0
    if on_gpu and seconds is not None:
        wait_s = VERIFY_LAYER_S * model.spec.layers + VERIFY_SHARE * seconds(1)
        wait_s += 0.0 if chosen.on_device else WAIT_S
    return Speculation(
        chosen.drafter,
        seconds=seconds,
        widths=widths,
        wait_s=wait_s,
        waits=not chosen.on_device,
        on_device=chosen.on_device,
        pace=HeadPace(_measured(model, config.batch_invariant), chosen.drafts) if paced else None,
        on_failure=None if ranks > 1 else _say_failed,  # ranks would not draft the same any more
    )


def _seconds(runnable: "Runnable", ranks: int, invariant: bool) -> "Seconds":
    model, weight = runnable.model, runnable.model.embedding.weight
    if not weight.is_cuda and ranks == 1:
        return _measured(model, invariant)
    if not weight.is_cuda:
        return modelled_seconds(model.spec, 1.0, ranks, "", "")
    import torch

    from cairn.models.linear.maps import held_bytes
    from cairn.serve.engine.step_budget import NAMES

    each = held_bytes(model) / max(model.spec.matmul_parameters(), 1)
    name = torch.cuda.get_device_name(weight.device)
    return modelled_seconds(model.spec, each, ranks, name, NAMES.get(str(weight.dtype), ""))


def _measured(model: "Transformer", invariant: bool) -> MeasuredSeconds:
    from cairn.serve.engine.speculate.row_costs import row_costs

    return MeasuredSeconds(_passes if invariant else row_costs(model))


def _passes(tokens: int) -> float:
    """Through the model with `batch_invariant`, which always has 16 rows: neighbouring tokens are mostly in one."""
    from cairn.serve.engine.batch_invariant import ROWS

    return 1 + (tokens - 1) / ROWS


def _say_failed(problem: Exception) -> None:
    log.warning(
        "the drafter failed, serving goes on without drafts: %s: %s",
        type(problem).__name__,
        problem,
    )
