"""KL divergence between the training model and the served model on held-out tokens.

Training computes through its own kernels and types, over masters in float32. A server gets the exported weights.
The same tokens go through both: through the layout that trains, and through the plain model with the weights rounded as
an export rounds them, which is what `cairn verify` holds a server against. The estimate is k3 of the log-probabilities
of the targets (exp(d) - 1 - d, never negative); it is 0 in float32 and grows with every rounding between the two sides.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.models.attend import PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.transformer import Transformer
from cairn.train.checkpoint.piece import pieces_of
from cairn.train.data.batch import IGNORED, Batch
from cairn.train.heads import TargetLogProbs, Values
from cairn.train.precision import DTYPES
from cairn.train.state import TrainState


def obstacle(state: TrainState) -> str | None:
    """Why this run cannot measure it, or None."""
    if state.base is not None:
        return "frozen weights are not part of its state"
    pieces = state.parallel.named_state()
    needed = {slot.name for slot in Transformer(state.spec, ModelBuild("meta")).slots()}
    if needed - pieces.keys() or any(
        piece.tensor.shape != piece.shape for piece in pieces.values()
    ):
        return "no rank holds the whole model"
    return None


@torch.no_grad()
def serving_model(state: TrainState) -> Transformer:
    """The weights of this moment in a plain model, in the type of an export."""
    dtype = DTYPES[state.config.precision.kind]
    model = Transformer(state.spec, ModelBuild("meta", dtype)).to_empty(device=state.device)
    trained = state.parallel.named_state()
    for name, piece in pieces_of(list(model.slots()), dict(model.named_parameters())).items():
        piece.tensor.copy_(trained[name].tensor)
    return model.eval()


@torch.inference_mode()
def divergence(
    state: TrainState, batches: Sequence[Batch], trained: Sequence[Values]
) -> tuple[float, int]:
    """Summed k3 over the targets of these batches, and how many there are. `trained`: of `TargetLogProbs`."""
    model, head = serving_model(state), TargetLogProbs(state.spec)
    total, tokens = 0.0, 0
    for batch, values in zip(batches, trained, strict=True):
        attend = PackedDocuments(batch.lengths, state.device)
        hidden_TD = model(batch.tokens_T, batch.positions_T, attend)
        served_T = head(hidden_TD, model.head or model.embedding, batch)["logp"]
        counted_T = batch.targets_T != IGNORED
        total += k3(served_T[counted_T], values["logp"][counted_T])
        tokens += int(counted_T.sum())
    return total, tokens


def k3(served: Tensor, trained: Tensor) -> float:
    """exp(d) - 1 - d with d = served - trained, summed."""
    difference = served.double() - trained.double()
    return float((difference.exp() - 1 - difference).sum())
