"""The plain Transformer under autograd, and nothing else: the oracle of every way to train.

It offers the little of `Parallel` that tests ask for, one batch after another with all logits at once. No kernel, no
rule, no bucket: torch's own cross entropy, or what `loss_of` makes of the logits of a batch.
"""

import torch
import torch.nn.functional as F

from cairn.models.attend import PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.weights import random_model
from cairn.train.checkpoint.piece import pieces_of
from cairn.train.data.batch import IGNORED


def cross_entropy(logits_TV, batch):
    return F.cross_entropy(logits_TV, batch.targets_T, reduction="none", ignore_index=IGNORED)


class PlainModel:
    data_rank, data_ranks = 0, 1

    def __init__(self, spec, seed=0, dtype=torch.float32, loss_of=cross_entropy, frozen=()):
        """`frozen`: names of checkpoint tensors that get no gradient."""
        self.model = random_model(spec, ModelBuild("cpu", torch.float32), seed).to(dtype)
        self.loss_of, self.slots = loss_of, list(self.model.slots())
        for slot in self.slots:
            self.model.get_parameter(slot.parameter).requires_grad_(slot.name not in frozen)

    def forward_backward(self, batches, loss, valid):
        """`loss` is not asked."""
        total = 0.0
        for batch in batches:
            hidden_TD = self.model(
                batch.tokens_T, batch.positions_T, PackedDocuments(batch.lengths)
            )
            share = self.loss_of(self.model.logits(hidden_TD), batch).sum() / valid
            share.backward()
            total = total + share.detach()
        return total

    def sum_over_data(self, value):
        return value

    def parameters(self):
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def gradients(self):
        return {name: p.grad for name, p in self.parameters().items() if p.grad is not None}

    def grad_norm(self):
        return (
            torch.stack([g.double().square().sum() for g in self.gradients().values()]).sum().sqrt()
        )

    def steer_routers(self, factor):
        pass

    def zero_grad(self):
        self.model.zero_grad()

    def named_state(self, tensors=None):
        return pieces_of(self.slots, self.parameters() if tensors is None else tensors)


def named_gradients(parallel, batches, loss, valid):
    """Loss and gradients of one step by the names of a checkpoint, which no form of a model changes."""
    value = parallel.forward_backward(batches, loss, torch.tensor(float(valid)))
    pieces = parallel.named_state(parallel.gradients())
    found = {name: piece.tensor.clone() for name, piece in pieces.items()}
    parallel.zero_grad()
    return value, found
