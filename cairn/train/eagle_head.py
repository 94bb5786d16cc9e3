"""Train an EAGLE-3 head for a model that stays as it is: the head is unrolled as it will draft (arXiv:2503.01840).

    pass 0    the target's hidden state at i, token i+1          -> distribution of token i+2
    pass s    the head's own hidden state of pass s-1, token i+1+s -> distribution of token i+2+s

Each pass is held against what the target says there (Kullback-Leibler divergence). A query of pass s sees the keys of
pass 0 up to its place, and behind them one key of each later pass of its own chain: just what it sees in the engine.
Rows of one length, one device, torch's AdamW: a head is small, and its target is only read.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.models.attend import AttentionRule, PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.eagle import EagleHead, random_head, random_spec
from cairn.models.layer_loop import PlainStep
from cairn.models.transformer import Transformer, rotations_of

PASSES = 3
DECAY = 0.8  # what a further pass counts for


class Schedule(NamedTuple):
    steps: int = 1000
    lr: float = 1e-3
    warmup: int = 50
    weight_decay: float = 0.01
    clip: float = 1.0

    def at(self, step: int) -> float:
        """Linear up, then a cosine down to a tenth."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        share = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))


class Rows(NamedTuple):
    """Texts of one length, of which shorter ones are padded at their end."""

    tokens_BN: Tensor
    counted_BN: Tensor | None = None  # behind which tokens the head has to guess; None: all


class Taught(NamedTuple):
    """Outputs of the target model for rows of tokens."""

    tapped: list[Tensor]  # [B * N, D] behind each tapped layer
    logits_BNV: Tensor


class EqualRows(PackedDocuments):
    """Documents of one length, which attend all at once where attention is of the common kind."""

    def __call__(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, rule: AttentionRule) -> Tensor:
        if rule.window or rule.by_scores:
            return super().__call__(q_THC, k_TKC, v_TKC, rule)
        q, k, v = (
            x.unflatten(0, (len(self.lengths), -1)).transpose(1, 2) for x in (q_THC, k_TKC, v_TKC)
        )
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=rule.scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)


class Unrolled:
    """The attention of a head's passes over B rows of N tokens."""

    def __init__(self, rows: int, tokens: int) -> None:
        self.rows, self.tokens = rows, tokens
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def lengths_T(self) -> Tensor:
        raise NotImplementedError("the rotation of a head does not depend on lengths")

    def __call__(self, q_THC: Tensor, k_TKC: Tensor, v_TKC: Tensor, rule: AttentionRule) -> Tensor:
        heads, groups = q_THC.shape[1], q_THC.shape[1] // k_TKC.shape[1]
        q, k, v = (x.unflatten(0, (self.rows, self.tokens)) for x in (q_THC, k_TKC, v_TKC))
        self.keys.append(k.repeat_interleave(groups, 2))
        self.values.append(v.repeat_interleave(groups, 2))
        scores = [torch.einsum("bqhc,bkhc->bhqk", q, self.keys[0])]
        later = torch.ones(self.tokens, self.tokens, dtype=torch.bool, device=q.device).triu(1)
        scores[0] = scores[0].masked_fill(later, -torch.inf)
        scores += [torch.einsum("bqhc,bqhc->bhq", q, own)[..., None] for own in self.keys[1:]]
        weights = (torch.cat(scores, -1).float() * rule.scale).softmax(-1).to(q.dtype)
        out = torch.einsum("bhqk,bkhc->bqhc", weights[..., : self.tokens], self.values[0])
        for at, own in enumerate(self.values[1:]):
            out = out + weights[..., self.tokens + at].transpose(1, 2)[..., None] * own
        return out.reshape(-1, heads, q.shape[-1])


@torch.no_grad()
def teach(model: Transformer, tokens_BN: Tensor, taps: tuple[int, ...]) -> Taught:
    rows, tokens = tokens_BN.shape
    attend = EqualRows([tokens] * rows, tokens_BN.device)
    hidden_TD, tapped = model.tapped(tokens_BN.flatten(), attend.positions_T(), attend, taps)
    return Taught(tapped, model.logits(hidden_TD).unflatten(0, (rows, tokens)))


def draft_tokens(texts_XN: Tensor, vocabulary: int, count: int) -> Tensor:
    """The most frequent tokens of some texts, ascending: a smaller vocabulary for a head."""
    counts_V = texts_XN.flatten().bincount(minlength=vocabulary)
    return counts_V.argsort(descending=True, stable=True)[:count].sort().values


@torch.no_grad()
def head_for(model: Transformer, known_K: Tensor) -> EagleHead:
    """A head in float32 that guesses these tokens, and begins with the target's output rows of them."""
    weight_VD = (model.head or model.embedding).weight
    # Residuals of a target may be large; normed, the layer's own part counts from the first step, and passes are alike.
    shape = random_spec(model.spec)
    spec = msgspec.structs.replace(shape, draft_vocab=len(known_K), norm_before_residual=True)
    head = random_head(model.spec, ModelBuild(weight_VD.device, torch.float32), spec)
    known_K = known_K.to(weight_VD.device)
    head.d2t.copy_(known_K - torch.arange(len(known_K), device=known_K.device))
    head.head.weight.copy_(weight_VD[known_K])
    return head


def known_tokens(head: EagleHead) -> Tensor:
    return torch.arange(head.spec.draft_vocab, device=head.d2t.device) + head.d2t


def guesses(
    head: EagleHead, model: Transformer, tokens_BN: Tensor, taught: Taught, passes: int = PASSES
) -> Iterator[Tensor]:
    """Scores [B, N, K] of each pass s for the token at distance two plus s, over the head's vocabulary."""
    rows, tokens = tokens_BN.shape
    attend, h_TD = Unrolled(rows, tokens), head.fuse(taught.tapped)
    embedding = head.embedding or model.embedding
    for done in range(passes):
        following_BN = tokens_BN.roll(-1 - done, 1)  # what it rolls around is not counted
        positions_N = torch.arange(done, tokens + done, device=tokens_BN.device)
        positions_T = positions_N.repeat(rows)
        rotations = rotations_of(head.spec.layer, range(1), positions_T, attend, h_TD.dtype)
        h_TD = head(embedding(following_BN.flatten()), h_TD, PlainStep(attend, rotations))
        yield head.logits(h_TD).unflatten(0, (rows, tokens))


def head_losses(
    head: EagleHead, model: Transformer, rows: Rows, taught: Taught, passes: int = PASSES
) -> list[Tensor]:
    """Mean divergence from the target for each pass, over the head's vocabulary."""
    tokens_BN, counted_BN = rows
    known_K, losses = known_tokens(head), []
    for done, guessed_BNK in enumerate(guesses(head, model, tokens_BN, taught, passes)):
        guessed = guessed_BNK[:, : -1 - done]
        target_logits = taught.logits_BNV[:, 1 + done :, known_K]
        loss = F.kl_div(
            guessed.float().log_softmax(-1),
            target_logits.float().log_softmax(-1),
            reduction="none",
            log_target=True,
        ).sum(-1)
        losses.append(_mean(loss, counted_BN, 1 + done))
    return losses


@torch.no_grad()
def held_shares(
    head: EagleHead, model: Transformer, rows: Rows, passes: int = PASSES
) -> list[float]:
    """Acceptance rate by draft position, if drafting began after every counted token.

    A guess holds if it is the token of the text and those before it hold: so the engine accepts, at any temperature.
    """
    tokens_BN, counted_BN = rows
    taught, known_K = teach(model, tokens_BN, head.spec.taps), known_tokens(head)
    held_BN, shares = torch.ones_like(tokens_BN, dtype=torch.bool), []
    for done, guessed_BNK in enumerate(guesses(head, model, tokens_BN, taught, passes)):
        held_BN = held_BN & (known_K[guessed_BNK.argmax(-1)] == tokens_BN.roll(-2 - done, 1))
        whole_BM = held_BN[:, : -1 - passes].float()  # the same chains for every pass
        shares.append(float(_mean(whole_BM, _whole_chains(counted_BN, passes), 0)))
    return shares


def _whole_chains(counted_BN: Tensor | None, passes: int) -> Tensor | None:
    """Positions at which all passes of a chain follow counted tokens, which are contiguous."""
    return None if counted_BN is None else counted_BN[:, 1:-passes] & counted_BN[:, passes:-1]


def _mean(values_BM: Tensor, counted_BN: Tensor | None, first: int) -> Tensor:
    if counted_BN is None:
        return values_BM.mean()
    counted_BM = counted_BN[:, first:].to(values_BM.dtype)
    return (values_BM * counted_BM).sum() / counted_BM.sum().clamp(min=1)


def train_head(
    head: EagleHead,
    model: Transformer,
    batches: Iterator[Rows],
    schedule: Schedule,
    passes: int = PASSES,
) -> Iterator[list[float]]:
    """Train one step per batch and yield the losses of the passes. The target does not change."""
    trained = [p.requires_grad_() for name, p in head.named_parameters() if "embedding" not in name]
    optimizer = torch.optim.AdamW(
        trained, schedule.lr, betas=(0.9, 0.95), weight_decay=schedule.weight_decay
    )
    for step, rows in zip(range(schedule.steps), batches, strict=False):
        for group in optimizer.param_groups:
            group["lr"] = schedule.at(step)
        taught = teach(model, rows.tokens_BN, head.spec.taps)
        losses = head_losses(head, model, rows, taught, passes)
        total = sum((DECAY**at * loss for at, loss in enumerate(losses)), losses[0] * 0)
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(trained, schedule.clip)
        optimizer.step()
        yield [float(loss.detach()) for loss in losses]
    head.requires_grad_(False)
