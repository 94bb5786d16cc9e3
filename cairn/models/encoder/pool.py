"""Pooling of packed texts on the device: [T, D] -> [B, D], in float32."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cairn.models.encoder.attend import sent
from cairn.models.encoder.pooling_rules import Pooling


def pooled(hidden_TD: Tensor, lengths: Sequence[int], poolings: Sequence[Pooling]) -> Tensor:
    """Each text by its own rule; texts of one batch may have different ones."""
    counts_B = sent(np.array(lengths), hidden_TD.device)
    by_rule = {rule: _by_rule(rule, hidden_TD, counts_B) for rule in dict.fromkeys(poolings)}
    if len(by_rule) == 1:
        return next(iter(by_rule.values()))
    return torch.stack([by_rule[rule][at] for at, rule in enumerate(poolings)])


def _by_rule(rule: Pooling, hidden_TD: Tensor, counts_B: Tensor) -> Tensor:
    ends_B = counts_B.cumsum(0)
    if rule == "cls":
        return hidden_TD[ends_B - counts_B].float()
    if rule == "last":
        return hidden_TD[ends_B - 1].float()
    texts_T = torch.repeat_interleave(counts_B)
    shape = (len(counts_B), hidden_TD.shape[1])
    if rule == "max":
        lowest_BD = hidden_TD.new_full(shape, -torch.inf, dtype=torch.float32)
        index_TD = texts_T[:, None].expand(-1, shape[1])
        return lowest_BD.scatter_reduce(0, index_TD, hidden_TD.float(), "amax")
    sums_BD = hidden_TD.new_zeros(shape, dtype=torch.float32)
    return sums_BD.index_add_(0, texts_T, hidden_TD.float()) / counts_B[:, None]
