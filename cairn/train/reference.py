"""Log probabilities of a reference model: the stream `reference` of every batch.

with an adapter       the base: the same weights, with the adapter left out of the sum, in every layout
without one           a second model with the weights that the run began with, on every rank
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cairn.models.adapter.attach import adapter_off
from cairn.models.linear.maps import Vocabulary
from cairn.models.transformer import Transformer
from cairn.train.data.batch import Batch
from cairn.train.heads import TargetLogProbs
from cairn.train.next_batches import NextBatches, StatefulBatches
from cairn.train.pair_objective import REFERENCE
from cairn.train.parallel.context import attend_for
from cairn.train.parallel.model import ParallelModel

if TYPE_CHECKING:
    from cairn.train.state import TrainState


class ReferredBatches:
    """Batches of a source, each with the log-probabilities of the reference."""

    def __init__(
        self, batches: NextBatches, head: TargetLogProbs, frozen: Transformer | None = None
    ) -> None:
        """`frozen`: the reference, where it is not the base of an adapter."""
        self.batches, self.head, self.frozen = batches, head, frozen
        self.fingerprint, self.may_be_empty = batches.fingerprint, batches.may_be_empty

    def next_batches(self, state: "TrainState") -> list[Batch]:
        batches = self.batches.next_batches(state)
        logps = (
            [self._frozen(batch) for batch in batches]
            if self.frozen
            else self._base(state, batches)
        )
        return [
            batch._replace(extra=batch.extra | {REFERENCE: logp_T})
            for batch, logp_T in zip(batches, logps, strict=True)
        ]

    def _base(self, state: "TrainState", batches: list[Batch]) -> list[Tensor]:
        assert isinstance(state.parallel, ParallelModel)
        with ExitStack() as off:
            for stage in state.parallel.stages:
                off.enter_context(adapter_off(stage))
            return [values["logp"] for values in state.parallel.forward(batches, self.head)]

    @torch.no_grad()
    def _frozen(self, batch: Batch) -> Tensor:
        model = self.frozen
        assert model is not None
        attend = attend_for(batch, None, "ring")
        hidden_TD = model(batch.tokens_T, batch.positions_T, attend)
        vocabulary: Vocabulary = model.head or model.embedding
        return self.head(hidden_TD, vocabulary, batch)["logp"]

    def state_dict(self) -> dict[str, Any]:
        """State of the source, if it has one."""
        return self.batches.state_dict() if isinstance(self.batches, StatefulBatches) else {}

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        if isinstance(self.batches, StatefulBatches):
            self.batches.load_state_dict(states)

    def close(self) -> None:
        self.batches.close()
