"""The loss of chats with pictures: the decoder's rows of a picture come out of the tower, and may carry its gradients.

    pictures -tower-> rows -+
    ids -embedding----------+-> decoder -> cross entropy of the assistant's words

The mean is over all learnt tokens of the batch. A tower without trainable parameters runs without gradients.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.models.attend import PackedDocuments
from cairn.models.transformer import Transformer
from cairn.models.vision.encode import picture_rows
from cairn.models.vision.tiling_rules import ImageRules
from cairn.models.vision.tower import Tower
from cairn.train.data.picture_chats import PictureChat

IGNORED = -100


def picture_loss(
    model: Transformer, tower: Tower, rules: ImageRules, chats: Sequence[PictureChat]
) -> Tensor:
    device = model.embedding.weight.device
    model.arena_RD = _rows(model, tower, rules, chats)
    ids, targets, first_row = [], [], 0
    for chat in chats:
        own_S = torch.from_numpy(chat.ids)
        learnt_S = torch.where(torch.from_numpy(chat.learn), own_S, IGNORED)
        targets.append(F.pad(learnt_S[1:], (0, 1), value=IGNORED))
        ids.append(torch.where(own_S < 0, own_S - first_row, own_S))
        first_row += int((own_S < 0).sum())
    attend = PackedDocuments([len(chat.ids) for chat in chats], device)
    try:
        hidden_TD = model(torch.cat(ids).to(device), attend.positions_T(), attend)
    finally:
        model.arena_RD = None
    logits_TV = model.logits(hidden_TD).float()
    return F.cross_entropy(logits_TV, torch.cat(targets).to(device), ignore_index=IGNORED)


def _rows(
    model: Transformer, tower: Tower, rules: ImageRules, chats: Sequence[PictureChat]
) -> Tensor:
    """Embedding rows of all images of all chats; a dummy row without images."""
    pictures = [picture for chat in chats for picture in chat.pictures]
    weight = model.embedding.weight
    if not pictures:
        return weight.new_zeros(1, weight.shape[1])
    learns = any(parameter.requires_grad for parameter in tower.parameters())
    with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
        return torch.cat(picture_rows(tower, rules, pictures)).to(weight.dtype)
