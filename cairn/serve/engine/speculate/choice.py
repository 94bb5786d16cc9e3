"""From `--speculate` and `--draft-tokens` to a drafter and the rule that says how many drafts a step verifies."""

import logging
from typing import TYPE_CHECKING, NamedTuple

from cairn.serve.engine.speculate.draft_model import open_draft_model
from cairn.serve.engine.speculate.drafter import Drafter
from cairn.serve.engine.speculate.grammar_tokens import GrammarDrafter
from cairn.serve.engine.speculate.ngram import NgramDrafter
from cairn.serve.engine.speculate.speculation import Speculation
from cairn.serve.engine.speculate.step_seconds import MeasuredSeconds, modelled_seconds
from cairn.serve.engine.speculate.suffix import SuffixDrafter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cairn.models.runnable import OpenModel, Runnable
    from cairn.serve.config import EngineConfig
    from cairn.serve.engine.speculate.controller import Seconds

AUTO_DRAFTS = 7  # with the token before them, rows of 8
WAIT_S = 500e-6  # of the host for a step that verifies, on an H200, where nothing overlaps with it
VERIFIED_LONGER = 0.08  # of a step's time: what it takes longer when it verifies, on an H200
log = logging.getLogger("cairn")


class Chosen(NamedTuple):
    drafter: Drafter
    drafts: int  # most of a request in a step
    note: str
    on_device: bool = False  # drafted on a GPU, in the step that verifies


def choose_drafter(
    config: "EngineConfig", target: "OpenModel", on_gpu: bool = False
) -> Chosen | None:
    """None: nothing is drafted. A draft model is loaded here, before the memory that is left is counted."""
    if config.speculate == "off":
        return None
    auto = config.draft_tokens == "auto"
    drafts = AUTO_DRAFTS if config.draft_tokens == "auto" else config.draft_tokens
    drafter, what = _drafter(config, target)
    many = f"up to {drafts}, as many as are expected to pay" if auto else f"up to {drafts}"
    on_device = on_gpu and config.speculate == "ngram" and not config.plain
    return Chosen(drafter, drafts, f"drafts: {what}; {many}, in a step", on_device)


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


def make_speculation(
    chosen: Chosen, config: "EngineConfig", runnable: "Runnable", widths: "Sequence[int]"
) -> Speculation:
    """`widths`: of rows in CUDA graphs; none on a CPU."""
    model = runnable.model
    ranks, on_gpu = model.build.shards.size, model.embedding.weight.is_cuda
    seconds = _seconds(runnable, ranks) if config.draft_tokens == "auto" else None
    wait_s = 0.0
    if on_gpu and seconds is not None:
        wait_s = VERIFIED_LONGER * seconds(1) + (0.0 if chosen.on_device else WAIT_S)
    return Speculation(
        chosen.drafter,
        seconds=seconds,
        widths=widths,
        wait_s=wait_s,
        waits=not chosen.on_device,
        on_device=chosen.on_device,
        on_failure=None if ranks > 1 else _say_failed,  # ranks would not draft the same any more
    )


def _seconds(runnable: "Runnable", ranks: int) -> "Seconds":
    weight = runnable.model.embedding.weight
    if not weight.is_cuda:
        spec = runnable.model.spec
        return MeasuredSeconds() if ranks == 1 else modelled_seconds(spec, 1.0, ranks, "", "")
    import torch

    from cairn.models.linear.maps import held_bytes
    from cairn.serve.engine.step_budget import NAMES

    model = runnable.model
    each = held_bytes(model) / max(model.spec.matmul_parameters(), 1)
    name = torch.cuda.get_device_name(weight.device)
    return modelled_seconds(model.spec, each, ranks, name, NAMES.get(str(weight.dtype), ""))


def _say_failed(problem: Exception) -> None:
    log.warning(
        "the drafter failed, serving goes on without drafts: %s: %s",
        type(problem).__name__,
        problem,
    )
