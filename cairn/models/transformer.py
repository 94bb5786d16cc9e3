"""The model: one decoder for training, prefill and decode.

    tokens [T] -embed-> x [T, D] -layers-> x -norm-> hidden [T, D] -logits-> [T, V]

    layer:  x + attention(norm(x));  x + feed_forward(norm(x))

Tokens are packed: there is no batch dimension and no padding. `positions_T` says where in its sequence each
token stands, `attend` which tokens belong together and where earlier keys are. The model knows neither.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from cairn.models.attend import Attend
from cairn.models.experts import ExpertLayer
from cairn.models.layers import Attention, Build, FeedForward, Holder, Norm, Slot, Vocabulary
from cairn.models.rope import Rotation, rotation
from cairn.models.spec import ModelSpec, Rope


class Layer(nn.Module):
    def __init__(self, build: Build, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        experts = spec.experts_of(layer)
        self.attention_norm = Norm(build, spec, spec.hidden)
        self.attention = Attention(build, spec, layer)
        self.attention_post_norm = Norm(build, spec, spec.hidden) if spec.post_norms else None
        self.feed_forward_norm = Norm(build, spec, spec.hidden)
        self.feed_forward: FeedForward | ExpertLayer
        if experts is None:
            self.feed_forward = FeedForward(build, spec, spec.intermediate)
        else:
            self.feed_forward = ExpertLayer(build, spec, experts)
        self.feed_forward_post_norm = Norm(build, spec, spec.hidden) if spec.post_norms else None

    def forward(self, x_TD: Tensor, rotate: Rotation | None, attend: Attend) -> Tensor:
        y_TD = self.attention(self.attention_norm(x_TD), rotate, attend)
        x_TD = x_TD + (self.attention_post_norm(y_TD) if self.attention_post_norm else y_TD)
        y_TD = self.feed_forward(self.feed_forward_norm(x_TD))
        return x_TD + (self.feed_forward_post_norm(y_TD) if self.feed_forward_post_norm else y_TD)


class Transformer(nn.Module):
    """Built empty, by default on the meta device; `weights` fills it."""

    def __init__(self, spec: ModelSpec, build: Build = Build()) -> None:  # noqa: B008 (immutable)
        super().__init__()
        self.spec = spec
        self.build = build
        self.embedding = Vocabulary(build, spec.vocab, spec.hidden)
        self.position_embedding = (
            Positions(build, spec.context, spec.hidden) if spec.positions == "learned" else None
        )
        self.layers = nn.ModuleList(Layer(build, spec, i) for i in range(spec.layers))
        self.norm = Norm(build, spec, spec.hidden)
        self.head = None if spec.tied else Vocabulary(build, spec.vocab, spec.hidden)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the last norm, [T, D]; `logits` makes scores of those that are needed."""
        x_TD = self.embed(tokens_T, positions_T)
        rotations = self.rotations(positions_T, attend, x_TD.dtype)
        for i, layer in enumerate(self.layers):
            x_TD = layer(x_TD, rotations.get(self.spec.rope_of(i)), attend)
        return self.norm(x_TD)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        scores_TV = (self.head or self.embedding).logits(hidden_TD)
        cap = self.spec.logit_softcap
        return cap * torch.tanh(scores_TV / cap) if cap else scores_TV

    def embed(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        x_TD = self.embedding(tokens_T)
        if self.spec.embedding_scale != 1.0:
            # Rounded to the weights' type first, as the reference rounds it.
            x_TD = x_TD * torch.tensor(self.spec.embedding_scale, dtype=x_TD.dtype).item()
        if self.position_embedding is not None:
            x_TD = x_TD + self.position_embedding(positions_T)
        return x_TD

    def rotations(
        self, positions_T: Tensor, attend: Attend, dtype: torch.dtype
    ) -> dict[Rope, Rotation]:
        """One table per kind of rotary positions, shared by all layers of that kind."""
        if self.spec.positions != "rope":
            return {}
        kinds = {self.spec.rope_of(i) for i in range(self.spec.layers)}
        lengths_T = attend.lengths_T() if any(k.kind == "dynamic" for k in kinds) else None
        return {k: rotation(k, self.spec, positions_T, lengths_T, dtype) for k in kinds}

    def slots(self) -> Iterator[Slot]:
        """Every tensor this model needs, by name, and where it goes."""
        for path, module in self.named_modules():
            if isinstance(module, Holder):
                yield from (slot.under(path) for slot in module.slots())


class Positions(Holder):
    """Learned absolute positions."""

    def __init__(self, build: Build, context: int, width: int) -> None:
        super().__init__()
        self.weight = build.parameter(context, width)

    def forward(self, positions_T: Tensor) -> Tensor:
        return nn.functional.embedding(positions_T, self.weight)

    def slots(self) -> Iterator[Slot]:
        yield Slot("weight", "weight", tuple(self.weight.shape))
