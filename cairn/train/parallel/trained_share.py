"""Share of trained weights in a run with frozen parts, on the pipeline rank with the most of them.

    frozen: embedding, layers 0..11     pp 2     rank 0 trains 0 of 1, rank 1 trains 1 of 1     ->  1.0

Ranks of tp, fsdp and dp cut or copy every weight alike, so the share of a pipeline's rank is theirs, too.
"""

import math

from cairn.models.spec import ModelSpec
from cairn.models.transformer import Transformer
from cairn.train.parallel.layout import IN_V, Layout, Strategy, stages
from cairn.train.parallel.pipeline.actions import holder
from cairn.train.parallel.stage import share_of
from cairn.train.trainable import Trainable


def largest_trained_share(
    spec: ModelSpec, trainable: Trainable, layout: Layout, strategy: Strategy
) -> float:
    """Trained values of all values, on the rank where that is most."""
    count = stages(layout, strategy)
    rank_of_layer: dict[int, int] = {}
    for stage in range(count):
        rank = _rank_of(stage, layout, strategy)
        rank_of_layer |= dict.fromkeys(share_of(spec.layers, stage, count).layers, rank)
    ends = (_rank_of(0, layout, strategy), _rank_of(count - 1, layout, strategy))
    parameters, trained = [0] * layout.pp, [0] * layout.pp
    for slot in Transformer(spec).slots():
        size = math.prod(slot.shape)
        for rank in _holders(slot.name, rank_of_layer, ends, spec.tied):
            parameters[rank] += size
            trained[rank] += size * trainable(slot.name)
    return max(part / whole for part, whole in zip(trained, parameters, strict=True) if whole)


def _rank_of(stage: int, layout: Layout, strategy: Strategy) -> int:
    return holder("v" if strategy.order in IN_V else "loop", layout.pp, stage)[0]


def _holders(name: str, layers: dict[int, int], ends: tuple[int, int], tied: bool) -> set[int]:
    kind, _, rest = name.partition(".")
    if kind == "layers":
        return {layers[int(rest.partition(".")[0])]}
    if kind == "embedding":
        return set(ends) if tied else {ends[0]}
    return {ends[0]} if kind == "position_embedding" else {ends[1]}
