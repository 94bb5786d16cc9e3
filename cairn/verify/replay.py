"""Replay of a captured request: on the fast path as it was served, and on the plain path.

    fast    the engine with the settings of the server, the request alone; hidden states are tapped behind each layer
    plain   float32, one operation after another, over the same tokens

Both give tokens, which are compared with those that were captured; and hidden states, which say in which layer the two
paths part. A request alone may differ from one in a crowd by rounding; the batch-invariant mode rules that out.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from cairn.core.errors import ConfigError
from cairn.models.attend import PackedDocuments
from cairn.models.linear.maps import linears
from cairn.models.linear.transposed import TransposedForm
from cairn.models.runnable import OpenModel
from cairn.models.transformer import Transformer
from cairn.serve.capture import Captured, CapturedAnswer, digest_of
from cairn.serve.config import NOT_SERVING, EngineConfig
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.request import Request
from cairn.serve.engine.runner import Runner
from cairn.serve.engine.start import start
from cairn.serve.grammar import Grammar, grammars_for
from cairn.verify.first_divergence import (
    PACKED_TOLERANCE,
    TOLERANCE,
    Departure,
    departure,
    first_difference,
)


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """Result of replaying an answer."""

    tokens: int
    digest: str  # as captured
    fast_digest: str
    plain_digest: str
    differs_at: int | None  # the first token at which the fast path differs from what was captured
    plain_differs_at: (
        int | None
    )  # the first token at which the plain path differs from the fast one
    departure: Departure | None  # the layer at which the fast path leaves the plain one
    errors: list[float]  # relative, behind each layer, at the place that was looked at
    place: int  # which token of the sequence that is

    @property
    def same(self) -> bool:
        return self.differs_at is None and self.departure is None


class Taps:
    """Hidden states behind every layer at every place of one request, as the engine's own form computes them."""

    def __init__(self, runner: Runner) -> None:
        self.layers = range(runner.model.spec.layers)
        self.by_place: dict[int, list[Tensor]] = {}
        self._compute = runner.compute
        runner.compute = self.compute  # type: ignore[method-assign]

    def compute(self, model: Any, logits: Any, inputs: Any, attend: Any, staged: Any) -> Any:
        return self._compute(self._tapped(model), logits, inputs, attend, staged)

    def _tapped(self, model: Any) -> Callable[[Tensor, Tensor, Any], Tensor]:
        form = model if hasattr(model, "tapped") else model.model

        def run(tokens_T: Tensor, positions_T: Tensor, attend: Any) -> Tensor:
            hidden_TD, tapped = form.tapped(tokens_T, positions_T, attend, self.layers)
            for row, place in enumerate(positions_T.tolist()):
                self.by_place[place] = [x_TD[row].float().cpu() for x_TD in tapped]
            return hidden_TD

        return run


def replay(
    captured: Captured,
    config: EngineConfig | None = None,
    prepare: Callable[[Engine], None] = lambda engine: None,
    watch: Callable[[str], None] = lambda said: None,
) -> list[Replayed]:
    """`config`: other settings than those of the server that captured it. `prepare` is given the fast engine.

    `watch` is told what is being done.
    """
    config = one_request(config or captured.engine)
    watch(f"loading {config.model} as it was served")
    fast, opened, _ = start(config)
    prepare(fast)
    grammars = _grammars(captured, opened, fast)
    taps, runs = [], []
    for answer, grammar in zip(captured.answers, grammars, strict=True):
        watch(f"the fast path answers: {len(answer.tokens)} tokens")
        taps.append(Taps(fast.runner))
        runs.append(run_alone(fast, answer, grammar))
        fast.runner.compute = taps[-1]._compute  # type: ignore[method-assign]
    packed = _is_packed(fast.runner.model)
    dtype = str(fast.runner.model.embedding.weight.dtype).removeprefix("torch.")
    del fast
    watch("loading the same weights in float32, for the plain path")
    plain = start(plain_of(config)).engine
    tolerance = PACKED_TOLERANCE if packed else TOLERANCE[dtype]
    found = []
    for answer, tokens, tap, grammar in zip(captured.answers, runs, taps, grammars, strict=True):
        watch(f"the plain path answers: {len(answer.tokens)} tokens")
        found.append(_compared(answer, tokens, tap, plain, tolerance, grammar))
    return found


def _grammars(captured: Captured, opened: OpenModel, engine: Engine) -> list[Grammar | None]:
    """Grammar of each answer, or None."""
    known = grammars_for(opened, engine.scheduler.limits.vocabulary)
    return [
        known.compile(answer.guide) if known is not None and answer.guide is not None else None
        for answer in captured.answers
    ]


def one_request(config: EngineConfig) -> EngineConfig:
    """Engine configuration for a replay: in this process and without graphs, whose layers cannot be observed."""
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"the request was served by {config.tensor_parallel_size} ranks, and is replayed by one",
            hint="give --tensor-parallel-size 1, if the model fits one device",
        )
    return msgspec.structs.replace(
        config, enforce_eager=True, enable_prefix_caching=False, **NOT_SERVING
    )


def plain_of(config: EngineConfig) -> EngineConfig:
    """Nothing is rounded: neither weights as they are loaded, nor the head, nor keys and values."""
    return msgspec.structs.replace(
        config,
        plain=True,
        dtype="float32",
        weights="float",
        quantization=None,
        head="auto",
        kv_cache_dtype="auto",
        batch_invariant=False,
        speculate="off",
    )


def run_alone(engine: Engine, answer: CapturedAnswer, grammar: Grammar | None = None) -> list[int]:
    """The tokens that the engine gives to this request when it runs alone."""
    count = len(answer.tokens)
    if not count:
        return []
    params = msgspec.structs.replace(
        answer.params, max_tokens=count, ignore_eos=True, stop=[], stop_token_ids=[], n=1
    )
    constraint = None if grammar is None else grammar.start()
    request = Request(0, answer.prompt, params, constraint=constraint)
    engine.add(request)
    list(engine.run())
    if request.error is not None:
        raise ConfigError(f"the request cannot be replayed here: {request.error}")
    return list(request.outputs[:count])


def _compared(
    answer: CapturedAnswer,
    fast: list[int],
    taps: Taps,
    plain: Engine,
    tolerance: float,
    grammar: Grammar | None,
) -> Replayed:
    slow = run_alone(plain, answer, grammar)
    differs, plain_differs = first_difference(answer.tokens, fast), first_difference(fast, slow)
    ids = [*answer.prompt, *fast]
    # The token that came out differently was chosen behind the one before it; else the last one is looked at.
    place = len(answer.prompt) - 1 + (len(fast) - 1 if plain_differs is None else plain_differs)
    place = min(max(place, 0), max(taps.by_place, default=0))
    looked = bool(taps.by_place)  # an answer without a token was never computed
    errors = _errors(plain.runner.model, ids[: place + 1], taps, place) if looked else []
    return Replayed(
        tokens=len(fast),
        digest=answer.digest,
        fast_digest=digest_of(fast),
        plain_digest=digest_of(slow),
        differs_at=differs,
        plain_differs_at=plain_differs,
        departure=departure(errors, tolerance),
        errors=errors,
        place=place,
    )


@torch.inference_mode()
def _errors(model: Transformer, ids: Sequence[int], taps: Taps, place: int) -> list[float]:
    """Relative, behind each layer: the largest over all places up to this one."""
    device = model.embedding.weight.device
    attend = PackedDocuments([len(ids)], device)
    tokens_T = torch.tensor(ids, dtype=torch.long, device=device)
    _, hidden = model.tapped(tokens_T, attend.positions_T(), attend, taps.layers)
    places = [at for at in sorted(taps.by_place) if at <= place]
    errors = []
    for layer, x_TD in enumerate(hidden):
        fast_RD = torch.stack([taps.by_place[at][layer] for at in places])
        plain_RD = x_TD.float().cpu()[places]
        off_R = (fast_RD - plain_RD).norm(dim=-1) / plain_RD.norm(dim=-1).clamp(min=1e-12)
        errors.append(float(off_R.max()))
    return errors


def _is_packed(model: Transformer) -> bool:
    """Return whether the matrices are packed in fewer bits than their dtype."""
    return any(not isinstance(part.form, TransposedForm | None) for part in linears(model))
