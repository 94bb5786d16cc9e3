"""The layer of a checkpoint that predicts one token further (multi-token prediction, arXiv:2412.19437), as a drafter.

    hidden state behind the last norm -norm-> g         token behind it -embedding, norm-> x
    [x, g] -join-> one layer as the model's, with keys of its own -> h -norm-> the model's output projection

Its guess takes the place of a token and h that of the hidden state, so one layer guesses as many tokens as are wanted.
Where a checkpoint has several such layers, the first one guesses all of them. Embedding and output projection are the
model's: copies of them in the checkpoint are left out. Qwen3-Next and Qwen3.5 have such a layer, too, which is not
read: other layers of theirs keep a state, and an engine refuses all drafts for those.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from cairn.core.errors import ConfigError
from cairn.models.attend import Attend
from cairn.models.build import ModelBuild, Slot, SlotModule
from cairn.models.checkpoint_names import TensorLocation, sources
from cairn.models.eagle import DraftPass, EagleHead
from cairn.models.layer_loop import ForwardStep, PlainResidual, PlainStep
from cairn.models.layers import Norm
from cairn.models.linear.maps import RowParallelLinear, Vocabulary
from cairn.models.safetensors_file import TensorSource
from cairn.models.shards import ALONE
from cairn.models.spec import ModelSpec
from cairn.models.transformer import Layer, Transformer, rotations_of
from cairn.models.weights import fill_shares, read_source


class Format(NamedTuple):
    """Names in a checkpoint, and what differs between those who trained such layers."""

    before: str  # all its tensors; {last}: the number behind the model's last layer
    token_norm: str
    hidden_norm: str
    join: str
    norm: str
    token_first: bool  # in what is joined
    goes_on_normed: bool  # h is normed before it takes the place of the hidden state


NUMBERED = "model.layers.{last}."
FORMATS = (
    Format(NUMBERED, "enorm", "hnorm", "eh_proj", "shared_head.norm", True, False),  # DeepSeek, GLM
    Format(
        "model.mtp_layers.0.",  # MiMo
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        token_first=False,
        goes_on_normed=True,
    ),
)


class MtpHead(nn.Module):
    taps: tuple[int, ...] = ()  # it reads what comes out of the model

    def __init__(self, target: ModelSpec, build: ModelBuild, format: Format) -> None:
        super().__init__()
        build, width = build._replace(shards=ALONE), target.hidden
        self.format = format
        # With this layer behind the last; the engine refuses heads for layers that differ.
        self.spec = msgspec.structs.replace(target, layers=target.layers + 1)
        self.token_norm = Norm(build, target, width)
        self.hidden_norm = Norm(build, target, width)
        self.join = RowParallelLinear(build, 2 * width, width, bias=False)
        self.layer = Layer(build, self.spec, target.layers)
        self.norm = Norm(build, target, width)
        self.embedding: Vocabulary | None = None  # the target's
        self.scores: Callable[[Tensor], Tensor] | None = None  # the target's, too

    def fuse(self, tapped: list[Tensor]) -> Tensor:
        (hidden_TD,) = tapped
        return hidden_TD

    def passed(
        self,
        x_TD: Tensor,
        g_TD: Tensor,
        positions_T: Tensor,
        attend: Attend,
        ends_B: Tensor | None = None,
    ) -> DraftPass:
        rotations = self.rotations(positions_T, attend, x_TD.dtype)
        return self.through(x_TD, g_TD, PlainStep(attend, rotations), PlainResidual, ends_B)

    def through(
        self,
        x_TD: Tensor,
        g_TD: Tensor,
        step: ForwardStep,
        residual: Callable[[Tensor], Any],
        ends_B: Tensor | None,
    ) -> DraftPass:
        """Whatever form the step and its residual have. `ends_B`: those wanted; every token leaves its keys."""
        both = [self.token_norm(x_TD), self.hidden_norm(g_TD)]
        entering_TE = torch.cat(both if self.format.token_first else both[::-1], -1)
        h_TD = step.run(self.layer, residual(self.join(entering_TE))).hidden()
        h_TD = h_TD if ends_B is None else h_TD[ends_B]
        normed_TD = self.norm(h_TD)
        return DraftPass(normed_TD if self.format.goes_on_normed else h_TD, normed_TD)

    def rotations(self, positions_T: Tensor, attend: Attend, dtype: torch.dtype) -> dict[Any, Any]:
        own = range(self.spec.layers - 1, self.spec.layers)
        return rotations_of(self.spec, own, positions_T, attend, dtype)

    def likeliest(self, normed_TD: Tensor) -> Tensor:
        """int32."""
        assert self.scores is not None
        return self.scores(normed_TD).argmax(-1).int()

    def guessed(self, normed_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens, and their chances."""
        assert self.scores is not None
        chance_T, found_T = self.scores(normed_TD).float().softmax(-1).max(-1)
        return found_T.int(), chance_T

    def slots(self) -> Iterator[Slot]:
        for path, part in self.named_modules():
            if isinstance(part, SlotModule):
                yield from (slot.under(path) for slot in part.slots())


def load_mtp(tensors: TensorSource, model: Transformer) -> MtpHead:
    """The first such layer of the model's checkpoint, on the model's device. A ConfigError: it has none."""
    weight, format = model.embedding.weight, format_of(tensors, model.spec)
    head = MtpHead(model.spec, ModelBuild("meta", weight.dtype, fused=weight.is_cuda), format)
    where = _places(head)
    if missing := sorted({place.tensor for place in where.values()} - set(tensors.names())):
        raise ConfigError(
            f"the layer that predicts further tokens has no {missing[0]}",
            hint="the download is incomplete, or the layer is of another kind than those of the model",
        )
    read = {slot.name: read_source(slot, where[slot.name], tensors) for slot in head.slots()}
    fill_shares(head, read, weight.device)
    head.scores = model.logits
    return head.requires_grad_(False)


def format_of(tensors: TensorSource, target: ModelSpec) -> Format:
    """Detect the MTP format by its tensors."""
    names, joins = set(tensors.names()), []
    for format in FORMATS:
        format = format._replace(before=format.before.format(last=target.layers))
        joins.append(f"{format.before}{format.join}.weight")
        if joins[-1] in names:
            return format
    raise ConfigError(
        f"speculate is mtp, and the checkpoint has no layer that predicts further tokens: no {' and no '.join(joins)}",
        hint="use --speculate ngram, or a checkpoint with its MTP layer",
    )


def _places(head: MtpHead) -> dict[str, TensorLocation]:
    """Source of each slot: layer tensors have the family's names, the others those of the format."""
    last, format = head.spec.layers - 1, head.format
    slots = {slot.name: slot.shape for slot in head.slots()}
    numbered = {
        name: name.replace("layer.", f"layers.{last}.", 1)
        for name in slots
        if name.startswith("layer.")
    }
    family = sources(head.spec, {numbered[name]: slots[name] for name in numbered})
    theirs = NUMBERED.format(last=last)
    places = {}
    for name in slots:
        part, _, kind = name.rpartition(".")
        if name in numbered:
            place = family[numbered[name]]
            places[name] = place._replace(tensor=place.tensor.replace(theirs, format.before, 1))
        else:
            places[name] = TensorLocation(f"{format.before}{getattr(format, part)}.{kind}")
    return places


DraftHead = EagleHead | MtpHead
