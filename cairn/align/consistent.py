"""The trainer's log-probabilities, bit by bit those of an engine that is batch invariant. On a CPU.

    engine    every pass through the model has ROWS rows, a token at the row of its position (`serve.engine.invariant`)
    trainer   the same passes, one sequence after another, with gradients; attention is the same function

Sums of floating-point numbers depend on their order, and the order on the shapes. With the same shapes on both sides
the two sides have one policy, not two that nearly agree: the ratio is exactly 1 on policy. The price is many small
passes in place of one large one. For models of plain attention alone (`check_covered`).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from cairn.core.errors import ConfigError
from cairn.models.attend import Rule
from cairn.models.spec import ModelSpec
from cairn.models.transformer import Transformer
from cairn.serve.engine.invariant import ROWS, attend_fixed, visible_keys
from cairn.train.data.batch import IGNORED, Batch


def check_covered(spec: ModelSpec) -> None:
    """Refuses what the trainer's passes do not compute as the engine does."""
    mixers = {spec.mixer_of(layer) for layer in range(spec.layers)} - {"attention"}
    found = [f"layers of {name}" for name in sorted(mixers)]
    found += ["experts"] if spec.experts is not None else []
    ropes = [rope for rope in (spec.rope, spec.rope_local) if rope is not None]
    found += ["dynamic rotations"] if any(rope.kind == "dynamic" for rope in ropes) else []
    if found:
        raise ConfigError(
            f"rollout.consistent for a model with {' and '.join(found)}: it covers plain attention, dense layers and "
            "rotations that do not depend on the length",
            hint="leave it out: the mismatch is printed every round",
        )


class FixedBlocks:
    """The attention of one sequence that comes in blocks of ROWS tokens; its keys and values have gradients."""

    def __init__(self, length: int) -> None:
        self.length, self.block = length, 0
        self._keys: dict[int, list[Tensor]] = {}  # by layer
        self._values: dict[int, list[Tensor]] = {}

    def __call__(self, q_GHC: Tensor, k_GKC: Tensor, v_GKC: Tensor, rule: Rule) -> Tensor:
        keys = self._keys.setdefault(rule.layer, [])
        values = self._values.setdefault(rule.layer, [])
        keys.append(k_GKC)
        values.append(v_GKC)
        seen_GN = visible_keys(self.block, rule.window)
        return attend_fixed(q_GHC, torch.cat(keys), torch.cat(values), seen_GN, rule)

    def lengths_T(self) -> Tensor:
        return torch.full((ROWS,), self.length, dtype=torch.int32)


def fixed_log_probs(model: Transformer, batch: Batch) -> Tensor:
    """Of each target, [T], with gradients; 0 for documents that have none."""
    begin, found = 0, []
    for length in batch.lengths:
        part = slice(begin, begin + length)
        targets_T = batch.targets_T[part]
        if bool((targets_T != IGNORED).any()):
            found.append(torch.cat(list(_of_document(model, batch.tokens_T[part], targets_T))))
        else:
            found.append(torch.zeros(length))
        begin += length
    return torch.cat(found)


def _of_document(model: Transformer, tokens_T: Tensor, targets_T: Tensor) -> Iterator[Tensor]:
    attend = FixedBlocks(len(tokens_T))
    for begin in range(0, len(tokens_T), ROWS):
        own = slice(begin, min(begin + ROWS, len(tokens_T)))
        count = own.stop - begin
        tokens_G = torch.zeros(ROWS, dtype=torch.int32)
        tokens_G[:count] = tokens_T[own]
        positions_G = torch.arange(begin, begin + ROWS, dtype=torch.int32)
        attend.block = begin // ROWS
        logits_GV = model.logits(model(tokens_G, positions_G, attend))
        exact_GV = logits_GV.double().log_softmax(-1)  # as `kernels.sampling.logprobs`
        yield exact_GV[:count].gather(1, targets_T[own].clamp(min=0)[:, None])[:, 0].float()
