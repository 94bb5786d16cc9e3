"""A model of a few thousand parameters and a task that it learns in seconds: sums of two digits, one character a token.

    7+5=12   ->   [7, +, 5, =, 1, 2]      the loss counts the answer only

The model is the Transformer of `cairn.models`, the loss that of `cairn.train`. Everything is float32 on the CPU, so
that a lab about an idea does not depend on the machine.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from cairn.models.attend import AttentionRule
    from cairn.models.spec import ModelSpec
    from cairn.models.transformer import Transformer

PLUS, EQUALS, VOCABULARY = 10, 11, 12
PROMPT = 4  # tokens before the answer
BASE = 10


def small_spec(**changes: Any) -> "ModelSpec":
    from cairn.models.spec import ModelSpec

    fields: dict[str, Any] = {
        "family": "qwen3",
        "vocab": VOCABULARY,
        "hidden": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "intermediate": 128,
        "context": 256,
        "qk_norm": True,
        "tied": True,
    }
    return ModelSpec(**(fields | changes))


def build(spec: "ModelSpec", seed: int = 0) -> "Transformer":
    import torch

    from cairn.models.build import ModelBuild
    from cairn.models.weights import random_model

    return random_model(spec, ModelBuild("cpu", torch.float32), seed)


def logits(model: "Transformer", rows_BT: "Tensor") -> "Tensor":
    """Scores for every next token of rows of one length, [B, T, V]."""
    import torch

    count, length = rows_BT.shape
    positions_T = torch.arange(length).repeat(count)
    hidden = model(rows_BT.reshape(-1), positions_T, EqualRows(count, length))
    return model.logits(hidden).reshape(count, length, -1)


class EqualRows:
    """Rows of one length side by side: `cairn.models.attend.PackedDocuments` without its loop over documents."""

    def __init__(self, count: int, length: int) -> None:
        self.count, self.length = count, length

    def lengths_T(self) -> "Tensor":
        import torch

        return torch.full((self.count * self.length,), self.length)

    def __call__(
        self, q_THC: "Tensor", k_TKC: "Tensor", v_TKC: "Tensor", rule: "AttentionRule"
    ) -> "Tensor":
        import torch.nn.functional as F

        q, k, v = (
            x.reshape(self.count, self.length, *x.shape[1:]).transpose(1, 2)
            for x in (q_THC, k_TKC, v_TKC)
        )
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=rule.scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)


def answer_loss(model: "Transformer", rows_BT: "Tensor") -> "Tensor":
    """Mean cross entropy of the tokens behind the prompt."""
    from cairn.train.objective import token_losses

    scores = logits(model, rows_BT)[:, PROMPT - 1 : -1]
    return token_losses(scores.flatten(0, 1), rows_BT[:, PROMPT:].flatten()).mean()


def sums(pairs: Iterable[tuple[int, int]]) -> "Tensor":
    import torch

    return torch.tensor([[a, PLUS, b, EQUALS, (a + b) // BASE, (a + b) % BASE] for a, b in pairs])


def all_sums() -> "Tensor":
    return sums((a, b) for a in range(BASE) for b in range(BASE))


def train(
    model: "Transformer",
    rows: "Tensor",
    steps: int,
    *,
    parameters: "Iterable[torch.nn.Parameter] | None" = None,
    rate: float = 3e-3,
) -> list[float]:
    """Full-batch AdamW; the losses before each step."""
    import torch

    optimizer = torch.optim.AdamW(
        list(model.parameters() if parameters is None else parameters), lr=rate, weight_decay=0.0
    )
    losses = []
    for _ in range(steps):
        loss = answer_loss(model, rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def accuracy(model: "Transformer", rows: "Tensor") -> float:
    """Share of rows whose whole answer is the likeliest one."""
    import torch

    with torch.no_grad():
        best = logits(model, rows)[:, PROMPT - 1 : -1].argmax(-1)
    return (best == rows[:, PROMPT:]).all(dim=1).float().mean().item()
