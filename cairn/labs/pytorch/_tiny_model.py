"""A small Transformer of ours on the CPU, and tokens to feed it: what several labs look at from different "
"sides."""

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from torch import Tensor

    from cairn.models.transformer import Transformer


def tiny_model(**changes: Any) -> "Transformer":
    """Float32, random weights; `changes` are fields of the spec."""
    import torch

    from cairn.models.build import ModelBuild
    from cairn.models.presets import preset
    from cairn.models.weights import random_model

    spec = msgspec.structs.replace(preset("tiny-qwen3"), **changes)
    return random_model(spec, ModelBuild("cpu", torch.float32), seed=0)


def tokens_of(model: "Transformer", count: int, seed: int = 0) -> "Tensor":
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.spec.vocab, (count,), generator=generator)


def hidden(model: "Transformer", tokens_T: "Tensor") -> "Tensor":
    """One document through the model."""
    from cairn.models.attend import PackedDocuments

    attend = PackedDocuments([len(tokens_T)])
    return model(tokens_T, attend.positions_T(), attend)
