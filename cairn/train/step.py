"""A training step.

    batches -> count valid tokens of all ranks -> forward, backward -> norm -> veto? -> update -> schedule moves on

The host waits for nothing here: loss, norm and the decision to skip stay on the device. A step that is vetoed, because
its loss or its gradients are not finite or the loss is a spike, changes neither weights nor optimizer
states nor the biases of routers.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cairn.core.events import span
from cairn.train.bad_step import veto
from cairn.train.lr_schedule import rate
from cairn.train.state import TrainState

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch


class StepResult(NamedTuple):
    """Tensors are scalars on the device; read them when you have time to wait."""

    step: int  # which one it was, from 0
    loss: Tensor  # mean over them
    norm: Tensor  # of the gradients, before they were clipped
    valid: Tensor  # tokens that had a loss, or samples of preferences; all ranks
    lr: float
    limit: float  # a loss above this was vetoed
    ids: list[int]  # samples that this process read
    tokens: int  # of this process


def train_step(state: TrainState, batches: "Sequence[Batch]") -> StepResult:
    config, parallel, scale = state.config, state.parallel, state.scale
    with span("train step", step=state.step):
        valid = parallel.sum_over_data(state.units(batches))
        share = parallel.forward_backward(
            batches, state.loss, scale.enlarge(valid.clamp(min=1)), scale.factor()
        )
        loss = scale.shrink(parallel.sum_over_data(share))
        loss = torch.where(valid > 0, loss, torch.nan)  # a mean over nothing is not 0

        norm, loss = parallel.norm_and_loss(loss)
        norm = scale.shrink(norm)
        limit = state.watch.limit()
        factor = veto(scale.shrink(clip_factor(norm, config.optim.max_norm)), loss, limit)
        lr = config.optim.lr * rate(config.schedule, state.step, config.steps) * state.lr_scale
        state.optimizer.update(parallel.gradients(), state.step + 1, lr, factor)
        parallel.steer_routers(factor)
        scale.update(~norm.isfinite())
        parallel.zero_grad()

    result = StepResult(
        step=state.step,
        loss=loss,
        norm=norm,
        valid=valid,
        lr=lr,
        limit=limit,
        ids=[number for batch in batches for number in batch.ids],
        tokens=sum(len(batch.tokens_T) for batch in batches),
    )
    state.step += 1
    state.samples += config.data.sequences
    state.tokens += config.tokens_per_step
    return result


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Factor that limits the gradient norm to `max_norm` (0: no limit); NaN for gradients that are not finite."""
    shortened = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
    return torch.where(norm.isfinite(), shortened, torch.nan)
