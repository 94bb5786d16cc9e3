"""Hypotheses about deviations of a server, each as a change that can be applied to the plain path. No torch.

    spec       another norm epsilon, rope base or factor, window, scale: the model's shape with one field changed
    weights    fewer bits: rounded to nearest, as most quantisers begin; or in places where they do not belong
    prompt     other tokens in front or around a text: begin-of-text, chat template

The list holds what goes wrong in practice; each entry says in a sentence what it would mean.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from cairn.models.spec import ModelSpec

Concern = Literal["spec", "weights", "prompt", "template"]
Misplaced = Literal["rope pairs", "rope halves", "shared heads", "gate and up", "last norm", "head"]
# So close that a value between two of them is explained by one: what is named then is the nearest.
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-3, 1e-4, 1e-7)
BASES = (1e4, 5e5, 1e6, 1e5, 2e4, 5e4, 1.5e5, 3e5, 2e6, 5e6, 1e7)
FACTORS = (2.0, 4.0, 8.0, 1.5, 16.0, 32.0)
YARNS = (4.0, 2.0)  # how a model that was trained without it is asked for a longer context


class Hypothesis(NamedTuple):
    name: str  # the cause: "norm epsilon", "rope factor", ...
    says: str  # what would be computed, with values
    concern: Concern
    spec: ModelSpec | None = None
    bits: Literal["int8", "int4", "bfloat16"] | None = None
    misplaced: Misplaced | None = None
    wide: bool = False  # groups of 128 around zero, as GPTQ and AWQ write them, in place of 32 with a minimum
    rounds_inputs: bool = False  # what enters a product has as few bits as this CPU multiplies
    probe: str = ""  # it shows only there; empty: in every text
    ids: Callable[[list[int]], list[int]] | None = None  # the tokens in place of those of the text


def of_spec(spec: ModelSpec) -> Iterator[Hypothesis]:
    yield from _of_norms(spec)
    if spec.positions == "rope":
        yield from _of_rope(spec)
    yield from _of_windows(spec)
    yield from _of_scales(spec)
    yield from _of_experts(spec)


def of_places(spec: ModelSpec) -> Iterator[Hypothesis]:
    """Weights where they do not belong, as far as a model of this spec has such places."""
    plain = spec.mixer == "attention" and not spec.mixers
    norms_heads = not spec.qk_norm or spec.qk_norm_over == "head"
    whole = not (spec.rope.rotated or spec.rope.sections or spec.rope_local)
    if plain and spec.positions == "rope" and whole and norms_heads:
        yield _misplaced("rope pairs", "neighbouring columns of a head are rotated together")
        yield _misplaced("rope halves", "columns of a head lie as rotated neighbours would")
    shared = 1 < spec.kv_heads < spec.heads and not (spec.sinks or spec.output_gate)
    if plain and shared and norms_heads:
        yield _misplaced("shared heads", f"query head h reads key head h mod {spec.kv_heads}")
    if spec.gated and spec.experts is None:
        yield _misplaced("gate and up", "the two products of a feed-forward layer are swapped")
    if spec.norm == "rms":
        yield _misplaced("last norm", "the weight of the last norm is left out")
    if not spec.tied:
        yield _misplaced("head", "the embedding stands where the output projection belongs")


def _misplaced(name: Misplaced, says: str) -> Hypothesis:
    return Hypothesis(name, says, "weights", misplaced=name)


def of_weights() -> Iterator[Hypothesis]:
    yield Hypothesis("quantisation", "weights rounded to 8 bits a row", "weights", bits="int8")
    yield Hypothesis(
        "quantisation", "weights rounded to 4 bits in groups of 32", "weights", bits="int4"
    )
    # On another grid: weights that were made from a 4-bit file lie on one of the grids already.
    yield Hypothesis(
        "quantisation", "weights rounded to 4 bits, wide groups", "weights", bits="int4", wide=True
    )


# How CPUs multiply with quantised weights: as 8-bit rows, and what enters a product has 8 bits, too.
EIGHT_BIT_PRODUCTS = Hypothesis(
    "quantisation", "weights and activations in 8 bits", "weights", bits="int8", rounds_inputs=True
)


def of_prompt(bos_id: int | None, starts: bool) -> Iterator[Hypothesis]:
    """`starts`: the tokenizer puts begin-of-text before a text."""
    if bos_id is None:
        return
    bos = bos_id
    if starts:
        yield Hypothesis(
            "begin of text", "the begin-of-text token is missing", "prompt", ids=lambda ids: ids[1:]
        )
    yield Hypothesis(
        "begin of text", "one begin-of-text token too many", "prompt", ids=lambda ids: [bos, *ids]
    )


def _changed(spec: ModelSpec, name: str, says: str, probe: str = "", **fields: Any) -> Hypothesis:
    return Hypothesis(name, says, "spec", msgspec.structs.replace(spec, **fields), probe=probe)


def _of_norms(spec: ModelSpec) -> Iterator[Hypothesis]:
    own = spec.norm_eps
    for eps in EPSILONS:
        if abs(eps / own - 1) > 1e-3:
            yield _changed(
                spec, "norm epsilon", f"norm epsilon {eps:g} instead of {own:g}", norm_eps=eps
            )
    if spec.norm == "rms":
        other = "w" if spec.norm_plus_one else "1 + w"
        yield _changed(
            spec,
            "norm weight",
            f"norms multiply with {other}",
            norm_plus_one=not spec.norm_plus_one,
        )


def _of_rope(spec: ModelSpec) -> Iterator[Hypothesis]:
    own, replace = spec.rope, msgspec.structs.replace
    for theta in BASES:
        if theta != own.theta:
            said = f"rope base {theta:g} instead of {own.theta:g}"
            yield _changed(spec, "rope base", said, rope=replace(own, theta=theta))
    if own.kind != "default":
        said = f"the {own.kind} scaling of rope by {own.factor:g} is left out"
        plain = replace(own, kind="default", factor=1.0, attention_factor=None, temperature=0.0)
        yield _changed(spec, "rope factor", said, rope=plain)
    for factor in FACTORS:
        if own.kind == "default" or factor != own.factor:
            kind = "linear" if own.kind == "default" else own.kind
            was = "no scaling" if own.kind == "default" else f"{own.factor:g}"
            said = f"rope factor {factor:g} ({kind}) instead of {was}"
            yield _changed(spec, "rope factor", said, rope=replace(own, kind=kind, factor=factor))
    for factor in YARNS if own.kind == "default" else ():
        said = f"rope factor {factor:g} (yarn) instead of no scaling"
        yield _changed(spec, "rope factor", said, rope=replace(own, kind="yarn", factor=factor))
    if spec.rope_local is not None:
        said = "windowed layers rotate as the others do"
        yield _changed(spec, "rope of windowed layers", said, rope_local=None)


def _of_windows(spec: ModelSpec) -> Iterator[Hypothesis]:
    if not any(spec.windows):
        return
    own = max(spec.windows)
    for change, said in ((1, "one token too wide"), (-1, "one token too narrow")):
        windows = tuple(window + change if window else 0 for window in spec.windows)
        says = f"window off by one: {own + change} instead of {own}, {said}"
        yield _changed(spec, "window", says, "long", windows=windows)
    # As wide as the context, not 0: layers with a window go on rotating as such layers do (`ModelSpec.rope_of`).
    none = tuple(spec.context if window else 0 for window in spec.windows)
    yield _changed(spec, "window", f"the window of {own} is left out", "long", windows=none)
    if 0 in spec.windows:
        every = tuple(own for _ in spec.windows)
        yield _changed(spec, "window", "every layer has the window", "long", windows=every)


def _of_scales(spec: ModelSpec) -> Iterator[Hypothesis]:
    if spec.embedding_scale != 1.0:
        yield _changed(spec, "embedding scale", "embeddings are not scaled", embedding_scale=1.0)
    if spec.query_scale and abs(spec.query_scale - spec.head_dim**-0.5) > 1e-9:
        yield _changed(
            spec, "query scale", "scores are scaled by the head size alone", query_scale=0.0
        )
    if spec.attention_softcap:
        yield _changed(spec, "soft-cap", "attention scores are not capped", attention_softcap=0.0)
    if spec.logit_softcap:
        yield _changed(spec, "soft-cap", "logits are not capped", logit_softcap=0.0)
    if spec.activation in ("gelu", "gelu_tanh"):
        other = "gelu" if spec.activation == "gelu_tanh" else "gelu_tanh"
        yield _changed(
            spec, "activation", f"{other} instead of {spec.activation}", activation=other
        )


def _of_experts(spec: ModelSpec) -> Iterator[Hypothesis]:
    if spec.experts is None:
        return
    own, replace = spec.experts, msgspec.structs.replace
    other = replace(own, renormalize=not own.renormalize)
    says = f"the weights of a token's experts are {'not ' if own.renormalize else ''}made to sum to one"
    yield _changed(spec, "weights of experts", says, experts=other)
    if own.scale != 1.0:
        says = f"the result of the experts is not scaled by {own.scale:g}"
        yield _changed(spec, "weights of experts", says, experts=replace(own, scale=1.0))
    for count in (own.per_token - 1, own.per_token + 1):
        if 1 <= count <= own.count:
            says = f"a token visits {count} experts instead of {own.per_token}"
            yield _changed(spec, "experts of a token", says, experts=replace(own, per_token=count))
