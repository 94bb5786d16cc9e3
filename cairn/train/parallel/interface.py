"""Interface of a parallelised model for the training step.

    batches -forward_backward-> gradients -grad_norm-> factor -> optimizer
    batches -forward, head-> log-probabilities, losses, hidden states

`model.ParallelModel` offers it in every layout, of which one process is the smallest, so neither the step nor the loop
nor a checkpoint knows a layout. Gradients are those of the global batch: the loss is
divided by the valid tokens of all data ranks, and the code that splits the batch sums over the ranks, never averages.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor, nn

from cairn.models.linear.maps import Vocabulary

if TYPE_CHECKING:
    from cairn.train.checkpoint.piece import Piece
    from cairn.train.data.batch import Batch
    from cairn.train.parallel.compute_time import ComputeTime
    from cairn.train.parallel.whole_matrices import Matrices


class Loss(Protocol):
    def __call__(
        self, hidden_TD: Tensor, vocabulary: Vocabulary, batch: "Batch", valid: Tensor
    ) -> Tensor:
        """This microbatch's share of the loss: the sum over its valid tokens / `valid`, to be walked backward.

        `vocabulary`: the output projection, whole or this rank's shard of it.
        """
        ...


@runtime_checkable
class CountsUnits(Protocol):
    """A loss whose mean is not one over tokens."""

    def units(self, batches: "Sequence[Batch]") -> int:
        """Number of losses in these microbatches."""
        ...


@runtime_checkable
class HasMetrics(Protocol):
    """A loss that has more to say than itself."""

    def metrics(self) -> dict[str, float]:
        """Since they were read last."""
        ...


class TokenHead(Protocol):
    def __call__(
        self, hidden_TD: Tensor, vocabulary: Vocabulary, batch: "Batch"
    ) -> dict[str, Tensor]:
        """Something for each token, [T, ...] by name: log-probabilities, losses, the hidden states themselves.

        `batch`: the tokens of `hidden_TD`, which are those of one rank under context parallelism.
        """
        ...


class Parallel(Protocol):
    data_rank: int  # which slice of a step's samples this process reads
    data_ranks: int
    compute_time: "ComputeTime"  # of a step, from its first `sum_over_data`

    def forward_backward(
        self, batches: "Sequence[Batch]", loss: Loss, valid: Tensor, scale: Tensor | float = 1.0
    ) -> Tensor:
        """Adds the gradients of all microbatches; this process's share of the loss. `valid`: global tokens.

        `scale`: what `valid` has been divided by, so that small gradients survive float16. Losses that enter by their
        gradient alone, as that of balanced experts, are multiplied by it.
        """
        ...

    def steer_routers(self, factor: Tensor) -> None:
        """Update the biases of balanced experts after `forward_backward`; a NaN `factor` leaves them unchanged."""
        ...

    def forward(self, batches: "Sequence[Batch]", head: TokenHead) -> list[dict[str, Tensor]]:
        """Apply `head` to each batch without gradients; results are on every rank that computes the batch.

        Changes no weight, no gradient and no router. With fsdp, and with experts on several ranks, all data ranks
        give equally many batches: a layer's weights and tokens travel between them.
        """
        ...

    def sum_over_data(self, value: Tensor) -> Tensor:
        """The sum over the data ranks of a value that each has a share of."""
        ...

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that this process updates, by path: local shards, without frozen ones."""
        ...

    def gradients(self) -> dict[str, Tensor]:
        """Gradients by the same paths, after `forward_backward`."""
        ...

    def grad_norm(self) -> Tensor:
        """Length of the gradients of all ranks together, each element once: float32 scalar on the device.

        The gradients are not scaled: the optimizer multiplies by the factor that the step makes of this norm.
        """
        ...

    def norm_and_loss(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """`grad_norm`, and the loss of the first rank for all ranks, so that all judge a step by the same bits.

        The groups that sum a loss are not the same on every rank, and may differ in the last bit. A loss that is not
        finite on any rank is not finite on all.
        """
        ...

    def zero_grad(self) -> None: ...

    def named_state(self, tensors: Mapping[str, Tensor] | None = None) -> "dict[str, Piece]":
        """Pieces of tensors that have the parameters' shapes, by global name; by default the parameters."""
        ...

    def matrices(self) -> "Matrices":
        """All tensors that this process holds a part of, by global name, and who holds the others."""
        ...
