"""Attention interface: the source of a token's keys and values.

The one argument by which training, prefill and decode differ: the model hands each layer's q, k and v for the
packed tokens [T] to an `Attend`, which knows which tokens belong together and what came before them.

    Packed   documents side by side, nothing cached           training, scoring, prefill without a cache
    Cached   each sequence continues its own contiguous cache  the plain generator

Both are written for clarity: a loop over sequences around torch's attention. They are the reference that the
paged and the ring forms are held against. Nothing here knows about layers' weights or about sampling.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch
from torch import Tensor

from cairn.core.errors import RequestError
from cairn.models import cpu_half_precision
from cairn.models.cache import layer_planes
from cairn.models.recurrence import Planes, Recurrence, empty_state
from cairn.models.spec import ModelSpec

if TYPE_CHECKING:
    from cairn.models.latent import LatentTokens


class AttentionRule(msgspec.Struct, frozen=True):
    """Attention parameters of a layer, independent of where the keys are stored."""

    layer: int
    scale: float
    window: int = 0  # how many tokens back, itself included; 0: all
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap); 0: as they are
    sinks_H: Tensor | None = None  # one more logit per head, which no value belongs to

    @property
    def by_scores(self) -> bool:
        """Return whether scores are modified before the softmax, which torch's attention does not support."""
        return bool(self.softcap) or self.sinks_H is not None


class Attend(Protocol):
    def __call__(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, rule: AttentionRule) -> Tensor:
        """Each token attends to its own sequence up to itself; [T, H, C]."""
        ...

    def lengths_T(self) -> Tensor:
        """Length of each token's sequence, including the tokens of this call."""
        ...


class PackedDocuments:
    """Documents of the given lengths side by side; each is a world of its own."""

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        reach_T: Tensor | None = None,
        axes_3T: Tensor | None = None,
    ) -> None:
        """`reach_T`: of each token the first position of its document that it does not see; None: the next one.

        `axes_3T`: frame, row and column of each token, which `models.rope` may turn by.
        """
        self.lengths = list(lengths)
        self.device = torch.device(device)
        self.reach_T, self.axes_3T = reach_T, axes_3T

    def positions_T(self) -> Tensor:
        return torch.cat([torch.arange(n, device=self.device) for n in self.lengths])

    def lengths_T(self) -> Tensor:
        counts = torch.tensor(self.lengths, device=self.device)
        return counts.repeat_interleave(counts)

    def __call__(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, rule: AttentionRule) -> Tensor:
        documents = zip(
            q_THC.split(self.lengths),
            k_TKC.split(self.lengths),
            v_TKC.split(self.lengths),
            strict=True,
        )
        if self.reach_T is None:
            return torch.cat([attention(q, k, v, rule) for q, k, v in documents])
        reaches = self.reach_T.split(self.lengths)
        pairs = zip(documents, reaches, strict=True)
        return torch.cat([attention(*document, rule, reach) for document, reach in pairs])

    def recur(self, rule: Recurrence, inputs: Planes) -> Tensor:
        """Every document begins with an empty state."""
        blank = empty_state(rule.planes, inputs[0].dtype, self.device)
        documents = zip(*(part.split(self.lengths) for part in inputs), strict=True)
        return torch.cat([rule.several(parts, blank)[0] for parts in documents])


class KVCache:
    """Keys and values of one sequence, all layers, in one contiguous block of fixed capacity; and its states."""

    def __init__(
        self, spec: ModelSpec, capacity: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        kept = spec.token_layers
        planes = layer_planes(spec, kept[0])  # keys and values, or one plane that is both
        shape = (len(kept), len(planes), capacity, planes[0].heads, planes[0].width)
        self._place_of = {layer: place for place, layer in enumerate(kept)}
        self.states: dict[int, Planes] = {
            layer: empty_state(layer_planes(spec, layer), dtype, device)
            for layer in range(spec.layers)
            if spec.keeps_state(layer)
        }
        self.blocks_L2NKC = torch.empty(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0

    def extend(self, layer: int, k_TKC: Tensor, v_TKC: Tensor) -> tuple[Tensor, Tensor]:
        """Write behind the known tokens of a layer; returns all keys and values so far."""
        end = self.length + k_TKC.shape[0]
        place = self._place_of[layer]
        keys, values = self.blocks_L2NKC[place, 0], self.blocks_L2NKC[place, -1]
        keys[self.length : end] = k_TKC
        values[self.length : end] = v_TKC
        return keys[:end], values[:end]


class Cached:
    """Attention over contiguous caches: `counts[i]` new tokens continue `caches[i]`.

    Every layer of the step writes at the same place; `commit` then makes the new tokens known.
    """

    def __init__(self, caches: Sequence[KVCache], counts: Sequence[int]) -> None:
        for cache, count in zip(caches, counts, strict=True):
            if cache.length + count > cache.capacity:
                raise RequestError(
                    f"{count} tokens do not fit behind {cache.length} in a cache of "
                    f"{cache.capacity}",
                    hint="make the cache as long as prompt and continuation together",
                )
        self.caches, self.counts = list(caches), list(counts)
        self.device = caches[0].blocks_L2NKC.device

    def positions_T(self) -> Tensor:
        spans = zip(self.caches, self.counts, strict=True)
        return torch.cat(
            [torch.arange(c.length, c.length + n, device=self.device) for c, n in spans]
        )

    def lengths_T(self) -> Tensor:
        counts = torch.tensor(self.counts, device=self.device)
        before = torch.tensor([c.length for c in self.caches], device=self.device)
        return (before + counts).repeat_interleave(counts)

    def __call__(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, rule: AttentionRule) -> Tensor:
        outputs, start = [], 0
        for cache, count in zip(self.caches, self.counts, strict=True):
            span = slice(start, start + count)
            keys, values = cache.extend(rule.layer, k_TKC[span], v_TKC[span])
            outputs.append(attention(q_THC[span], keys, values, rule))
            start += count
        return torch.cat(outputs)

    def recur(self, rule: Recurrence, inputs: Planes) -> Tensor:
        """Run the recurrence of each sequence: a single step for one token, the chunked form for several."""
        outputs, start = [], 0
        for cache, count in zip(self.caches, self.counts, strict=True):
            parts, before = (
                tuple(x[start : start + count] for x in inputs),
                cache.states[rule.layer],
            )
            if count == 1:
                y, states = rule.single(parts, tuple(plane[None] for plane in before))
                state = tuple(plane[0] for plane in states)
            else:
                y, state = rule.several(parts, before)
            cache.states[rule.layer] = state
            outputs.append(y)
            start += count
        return torch.cat(outputs)

    def latent(self, tokens: "LatentTokens", rule: AttentionRule) -> Tensor:
        """Rows of latent attention: several tokens attend in the expanded form, one in the absorbed form."""
        outputs, start = [], 0
        for cache, count in zip(self.caches, self.counts, strict=True):
            span = slice(start, start + count)
            new_T1E = tokens.rows_TE[span, None]
            rows_N1E, _ = cache.extend(rule.layer, new_T1E, new_T1E)
            outputs.append(tokens.attended(span, rows_N1E, rule))
            start += count
        return torch.cat(outputs)

    def commit(self) -> None:
        for cache, count in zip(self.caches, self.counts, strict=True):
            cache.length += count


def attention(
    q_SHC: Tensor, k_NKC: Tensor, v_NKC: Tensor, rule: AttentionRule, reach_S: Tensor | None = None
) -> Tensor:
    """Causal attention of the last S tokens of a sequence of N, grouped heads, window, soft-cap.

    `reach_S`: of each token the first key that it does not see, where that is not the one behind it.
    """
    q, k, v = (x.transpose(0, 1)[None] for x in (q_SHC, k_NKC, v_NKC))
    length, total = q_SHC.shape[0], k_NKC.shape[0]
    if rule.by_scores:
        out = _by_scores(q, k, v, _visible(length, total, rule.window, q.device, reach_S), rule)
    elif length == total and not (rule.window and rule.window < total) and reach_S is None:
        out = cpu_half_precision.attention(
            q, k, v, is_causal=True, scale=rule.scale, enable_gqa=True
        )
    else:
        plain = length == 1 and not (rule.window and rule.window < total)
        mask = None if plain else _visible(length, total, rule.window, q.device, reach_S)
        out = cpu_half_precision.attention(
            q, k, v, attn_mask=mask, scale=rule.scale, enable_gqa=True
        )
    return out[0].transpose(0, 1)


def _visible(
    length: int, total: int, window: int, device: torch.device, reach_S: Tensor | None
) -> Tensor:
    """Attention mask [S, N] of the last S tokens over N keys."""
    query_S1 = torch.arange(total - length, total, device=device)[:, None]
    key_N = torch.arange(total, device=device)
    mask_SN = key_N <= query_S1 if reach_S is None else key_N < reach_S[:, None]
    return mask_SN & (key_N > query_S1 - window) if window else mask_SN


def _by_scores(q: Tensor, k: Tensor, v: Tensor, mask_SN: Tensor, rule: AttentionRule) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = cpu_half_precision.matmul(q, k.transpose(-1, -2)) * rule.scale
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~mask_SN, float("-inf"))
    if rule.sinks_H is not None:
        sinks = rule.sinks_H.to(scores.dtype)[None, :, None, None]
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32)[..., : k.shape[-2]]
    return cpu_half_precision.matmul(weights.to(q.dtype), v)
