"""Sizes of the part of a model that reads pictures: a tower of layers over patches, and a projector to the decoder.

    picture --preprocess--> tiles of pixels --patches--> tower --projector--> rows, one for each placeholder token

The tower's layers are the decoder's own, so their sizes are a `ModelSpec`. No torch.
"""

from typing import Literal

import msgspec

from cairn.models.spec import Activation, ModelSpec

ProjectorKind = Literal["mlp", "shuffled"]
TowerPositions = Literal["learned", "rotary"]


class TowerSpec(msgspec.Struct, frozen=True):
    shape: ModelSpec  # of its layers; those behind the last one that is used are not counted
    patch: int  # pixels along a side
    image: int  # pixels along a side of the pictures that its learned positions were made for
    positions: TowerPositions = "learned"
    patch_bias: bool = True
    class_token: bool = False  # one more token in front, which the projector does not see
    pre_norm: bool = False  # in front of the first layer
    post_norm: bool = False  # behind the last

    @property
    def side(self) -> int:
        """Patches along a side of a picture of the trained size."""
        return self.image // self.patch


class ProjectorSpec(msgspec.Struct, frozen=True):
    """How hidden states of patches become rows of the decoder.

    mlp        two linear maps with an activation between                      LLaVA, Pixtral
    shuffled   `merge` x `merge` patches side by side, a linear map             Idefics 3, SmolVLM
    """

    kind: ProjectorKind
    hidden: int  # of the decoder
    bias: bool = True
    activation: Activation = "gelu"
    merge: int = 1  # patches along a side that become one row


class VisionSpec(msgspec.Struct, frozen=True):
    family: str
    tower: TowerSpec
    projector: ProjectorSpec
    image_token: int  # the id that stands for one row
    both_ways: bool = False  # tokens of a picture see the whole picture

    def rows(self, height: int, width: int) -> int:
        """Rows of one tile of so many pixels."""
        cell = self.tower.patch * self.projector.merge
        return (height // cell) * (width // cell)
