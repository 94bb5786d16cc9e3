"""Quality loss of a compressed model: perplexity before and after, and the divergence of its predictions."""

import math

import msgspec
import torch
from torch import Tensor

from cairn.compress.layer_by_layer import final_hidden
from cairn.models.transformer import Transformer

CHUNK = 512  # tokens whose scores of all words exist at a time


class Quality(msgspec.Struct, frozen=True, kw_only=True):
    tokens: int
    perplexity_before: float
    perplexity: float
    kl: float  # of the changed model's predictions from the original's, nats a token
    same_top: float  # share of tokens whose most likely successor is the same

    @property
    def added(self) -> float:
        """Perplexity that was added, as a share."""
        return self.perplexity / self.perplexity_before - 1

    def words(self) -> str:
        return (
            f"perplexity {self.perplexity_before:.3f} -> {self.perplexity:.3f} ({self.added:+.2%}), "
            f"KL {self.kl:.4f} nats, same most likely token {self.same_top:.1%} (over {self.tokens:,} tokens)"
        )


class Reference:
    """Predictions of the model before it was changed. Its head and last norm must not change."""

    def __init__(self, model: Transformer, windows_BL: Tensor, chunk_windows: int = 8) -> None:
        self.windows_BL, self.chunk_windows = windows_BL, chunk_windows
        self.hidden_TD = final_hidden(model, windows_BL, chunk_windows)

    @torch.no_grad()
    def compare(self, model: Transformer) -> Quality:
        """The model as it is now against what it was."""
        now_TD = final_hidden(model, self.windows_BL, self.chunk_windows)
        count, length = self.windows_BL.shape
        inside_T = torch.arange(count * length, device=now_TD.device) % length < length - 1
        targets_T = self.windows_BL.flatten().roll(-1)[inside_T]
        pairs = zip(
            self.hidden_TD[inside_T].split(CHUNK),
            now_TD[inside_T].split(CHUNK),
            targets_T.split(CHUNK),
            strict=True,
        )
        sums = torch.zeros(4, dtype=torch.float64)
        for before_CD, after_CD, targets_C in pairs:
            sums += _sums(model, before_CD, after_CD, targets_C)
        total = len(targets_T)
        nats_before, nats, kl, same = (sums / total).tolist()
        return Quality(
            tokens=total,
            perplexity_before=math.exp(nats_before),
            perplexity=math.exp(nats) if nats < 700 else math.inf,
            kl=kl,
            same_top=same,
        )


def _sums(model: Transformer, before_CD: Tensor, after_CD: Tensor, targets_C: Tensor) -> Tensor:
    old_CV = model.logits(before_CD).float().log_softmax(-1)
    new_CV = model.logits(after_CD).float().log_softmax(-1)
    at_C1 = targets_C[:, None]
    found = (
        -old_CV.gather(1, at_C1).sum(),
        -new_CV.gather(1, at_C1).sum(),
        (old_CV.exp() * (old_CV - new_CV)).sum(),
        (old_CV.argmax(-1) == new_CV.argmax(-1)).sum(),
    )
    return torch.stack([value.double().cpu() for value in found])
