"""Weights where they do not belong, as conversions between formats put them: a state dict with one such mistake.

rope pairs      columns (0, 1), (2, 3) .. of a head are rotated together, instead of i and i + C/2
rope halves     columns are in the order in which (0, 1), (2, 3) .. belong together, and i and i + C/2 are rotated
shared heads    query head h reads key head h mod K, instead of h // (H/K)
gate and up     each of the two stands where the other belongs
last norm       its weight is left out
head            the embedding, where the file has an output projection of its own
"""

from collections.abc import Callable

import torch
from torch import Tensor

from cairn.models.spec import ModelSpec
from cairn.verify.hypotheses import Misplaced

State = dict[str, Tensor]


def rearranged(state: State, spec: ModelSpec, mistake: Misplaced) -> State:
    return _MISTAKES[mistake](dict(state), spec)


def _rope_pairs(state: State, spec: ModelSpec) -> State:
    """Halves that are rotated together were neighbours; products of queries and keys do not depend on the order."""
    return _ordered(state, spec, torch.arange(spec.head_dim).view(-1, 2).t().flatten())


def _rope_halves(state: State, spec: ModelSpec) -> State:
    return _ordered(state, spec, torch.arange(spec.head_dim).view(2, -1).t().flatten())


def _ordered(state: State, spec: ModelSpec, order_C: Tensor) -> State:
    """Queries and keys with the columns of each head in this order."""
    for name, weight in state.items():
        if _is_part(name, "qkv.q", "qkv.k", "q_norm", "k_norm"):
            heads = weight.view(-1, spec.head_dim, *weight.shape[1:])
            state[name] = heads[:, order_C].reshape(weight.shape)
    return state


def _shared_heads(state: State, spec: ModelSpec) -> State:
    """Queries in the order in which neighbours share keys as the mistake has it, and back behind attention."""
    order_H = torch.arange(spec.heads).view(-1, spec.kv_heads).t().flatten()
    for name, weight in state.items():
        if _is_part(name, "qkv.q"):
            heads = weight.view(spec.heads, spec.head_dim, *weight.shape[1:])
            state[name] = heads[order_H].reshape(weight.shape)
        elif name.endswith("attention.out.weight"):
            heads = weight.view(-1, spec.heads, spec.head_dim)
            state[name] = heads[:, order_H].reshape(weight.shape)
    return state


def _gate_and_up(state: State, spec: ModelSpec) -> State:
    for name in [name for name in state if ".inner.gate." in name]:
        other = name.replace(".inner.gate.", ".inner.up.")
        state[name], state[other] = state[other], state[name]
    return state


def _last_norm(state: State, spec: ModelSpec) -> State:
    state["norm.weight"] = torch.full_like(state["norm.weight"], 0.0 if spec.norm_plus_one else 1.0)
    return state


def _head(state: State, spec: ModelSpec) -> State:
    state["head.weight"] = state["embedding.weight"]
    return state


def _is_part(name: str, *parts: str) -> bool:
    return name.endswith(
        tuple(f"attention.{part}.{kind}" for part in parts for kind in ("weight", "bias"))
    )


_MISTAKES: dict[Misplaced, Callable[[State, ModelSpec], State]] = {
    "rope pairs": _rope_pairs,
    "rope halves": _rope_halves,
    "shared heads": _shared_heads,
    "gate and up": _gate_and_up,
    "last norm": _last_norm,
    "head": _head,
}
