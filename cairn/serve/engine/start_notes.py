"""Startup log lines of an engine: each choice with its reason."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cairn.core.units import format_count
from cairn.models.runnable import OpenModel, Runnable
from cairn.serve.config import EngineConfig
from cairn.serve.engine.choose_limits import AT_ONCE, groups_note
from cairn.serve.engine.request import Limits
from cairn.serve.engine.runner import Runner
from cairn.serve.engine.speculate.choice import Chosen
from cairn.serve.engine.step_budget import Pace

if TYPE_CHECKING:
    from cairn.kernels.built import Lookups


def limit_notes(
    opened: OpenModel, runnable: Runnable, config: EngineConfig, limits: Limits, why: str
) -> Iterator[str]:
    """Describe the model and the limits; `why` explains the number of blocks."""
    yield runnable.summary()
    count = format_count(limits.capacity)
    yield f"{limits.pages - 1} pages of {limits.page_size} tokens ({count} tokens): {why}"
    if len(limits.groups) > 1:
        yield groups_note(limits)
    yield f"at most {limits.rows} requests and {limits.step_tokens} tokens in a step"
    yield from runnable.notes
    if config.max_model_len == "auto":
        made_for = f"the model was made for {opened.spec.context}"
        at_once = f"at least {AT_ONCE} of them fit into the cache at once"
        yield f"requests of up to {limits.context} tokens: {at_once}; {made_for}"
    elif (asked := config.max_model_len or 0) > opened.spec.context:
        more = f"max_model_len {asked} is more than the {opened.spec.context} tokens"
        yield f"{more} that the model was made for, and counts as those; --context {asked} stretches it"
    if limits.mixed_step_tokens:
        most = limits.mixed_step_tokens
        yield f"at most {most} tokens in steps that decode: about {config.step_ms:g} ms"


def form_notes(
    runner: Runner, forms: list[str], kernels: "Lookups | None", chosen: Chosen | None
) -> Iterator[str]:
    """Types of keys and values, forms of weights, where kernels come from, who drafts."""
    if runner.pool.scales is not None:
        yield runner.pool.scales.note()
    yield from forms
    if kernels is not None:
        yield kernels.note()
    if chosen is not None:
        yield chosen.note


def pace_note(pace: Pace) -> str:
    return f"a step takes about {pace.seconds:g} s at most, as measured while it runs"
