"""All that changes while a model trains, in one place: what a step updates and a checkpoint keeps.

    weights, optimizer states, loss scale, recent losses, random numbers     tensors, by name, as pieces
    step, samples consumed, tokens seen                                      three integers

The state of the data is the number of samples; of the schedule, the number of the step. A source with more state than
that saves it itself (`next_batches.StatefulBatches`).
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from cairn.models.spec import ModelSpec
from cairn.train.bad_step import Watch
from cairn.train.checkpoint.load import About
from cairn.train.checkpoint.piece import Piece, whole
from cairn.train.config import Train
from cairn.train.data.batch import Batch
from cairn.train.objective import valid_tokens
from cairn.train.optim.int8_states import BLOCK
from cairn.train.optim.optimizer import Offloaded, Optimizer
from cairn.train.parallel.interface import CountsUnits, Loss, Parallel
from cairn.train.precision import LossScale
from cairn.train.trainable import Base


class TrainState:
    def __init__(
        self,
        config: Train,
        spec: ModelSpec,
        parallel: Parallel,
        optimizer: Optimizer,
        loss: Loss,
        device: torch.device,
        base: Base | None = None,
    ) -> None:
        """`base`: where frozen weights come from; None: everything is trained."""
        self.config, self.spec, self.device, self.base = config, spec, device, base
        self.parallel, self.optimizer, self.loss = parallel, optimizer, loss
        self.scale = LossScale(config.precision.kind == "float16", device)
        self.watch = Watch(config.bad_step)
        self.step = 0  # updates done, skipped ones included
        self.samples = 0  # consumed by all ranks
        self.tokens = 0  # seen by all ranks
        self.lr_scale = 1.0  # of the next step; the source of its batches may ask for another one

    def units(self, batches: Sequence[Batch]) -> torch.Tensor:
        """Number of losses of this data rank: tokens, or the units of its loss."""
        if isinstance(self.loss, CountsUnits):
            return torch.tensor(float(self.loss.units(batches)), device=self.device)
        return valid_tokens([batch.targets_T for batch in batches], self.device)

    def pieces(self) -> dict[str, Piece]:
        """Every tensor that has to survive, under a name that no layout changes."""
        by_name = {f"model/{n}": p for n, p in self.parallel.named_state().items()}
        for role, tensors in self.optimizer.tensors().items():
            for name, piece in self.parallel.named_state(tensors).items():
                is_scale = role.endswith(".scale")
                by_name[f"optim/{role}/{name}"] = _of_blocks(piece) if is_scale else piece
        by_name |= {f"scale/{n}": whole(t) for n, t in self.scale.tensors().items()}
        return by_name | {f"random/{n}": whole(t) for n, t in _random().items()}

    def about(self, data: str, world: int, source: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """`data`: fingerprint of the source; `source`: its state on each data rank, where it has one."""
        about = About(
            step=self.step,
            samples=self.samples,
            tokens=self.tokens,
            spec=self.spec,
            data=data,
            watch=self.watch.state(),
            world=world,
            config=msgspec.to_builtins(self.config, enc_hook=str),
            base=self.base,
            source=list(source),
        )
        return msgspec.to_builtins(about)

    def restore(self, about: About, pieces: dict[str, Piece]) -> None:
        """Restore the remaining state after the tensors of `pieces` were read."""
        self.step, self.samples, self.tokens = about.step, about.samples, about.tokens
        if about.watch:
            self.watch.restore(about.watch)
        self.scale.restore({n: pieces[f"scale/{n}"].tensor for n in self.scale.tensors()})
        torch.set_rng_state(pieces["random/cpu"].tensor)
        if isinstance(self.optimizer, Offloaded):
            self.optimizer.take_weights()


def _of_blocks(piece: Piece) -> Piece:
    """The scales of 8-bit states have a column for each block of the parameter's columns."""
    *rows, columns = piece.shape
    *first, column = piece.offsets
    return piece._replace(shape=(*rows, -(-columns // BLOCK)), offsets=(*first, column // BLOCK))


def _random() -> dict[str, torch.Tensor]:
    return {"cpu": torch.get_rng_state()}
