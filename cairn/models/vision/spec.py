"""Sizes of the part of a model that reads pictures: a tower of layers over patches, and a projector to the decoder.

    picture --preprocess--> tiles of pixels --patches--> tower --projector--> rows, one for each placeholder token

The tower's layers are the decoder's own, so their sizes are a `ModelSpec`. No torch.
"""

from typing import Literal

import msgspec

from cairn.models.spec import Activation, ModelSpec

ProjectorKind = Literal["mlp", "shuffled", "linear", "pooled", "merged_mlp", "cells"]
# rotary: row and column have frequencies of their own; axial: the same ones
TowerPositions = Literal["learned", "rotary", "axial"]
Sees = Literal["before", "piece", "prompt"]


class TowerSpec(msgspec.Struct, frozen=True):
    shape: ModelSpec  # of its layers; those behind the last one that is used are not counted
    patch: int  # pixels along a side
    image: int  # pixels along a side of the pictures that its learned positions were made for
    positions: TowerPositions = "learned"
    patch_bias: bool = True
    class_token: bool = False  # one more token in front, which the projector does not see
    pre_norm: bool = False  # in front of the first layer
    post_norm: bool = False  # behind the last
    frames: int = 1  # that one patch spans; a picture is repeated
    window: int = 0  # patches along a side of the windows that patches see each other in; 0: all do
    full_layers: tuple[int, ...] = ()  # that see all patches nevertheless
    table: int = 0  # side of a square of learned positions that is stretched over the picture, too
    deep_layers: tuple[int, ...] = ()  # behind which rows for deeper layers of the decoder are made

    @property
    def side(self) -> int:
        """Patches along a side of a picture of the trained size."""
        return self.image // self.patch


class ProjectorSpec(msgspec.Struct, frozen=True):
    """Projection of hidden states of patches to rows of the decoder.

    mlp          two linear maps with an activation between                    LLaVA, Pixtral
    shuffled     `merge` x `merge` patches side by side, a linear map           Idefics 3, SmolVLM
    linear       a linear map                                                   PaliGemma
    pooled       the mean of `merge` x `merge` patches, a norm, a linear map    Gemma 3
    merged_mlp   a norm, patches side by side, a linear map, then as mlp        Mistral 3
    cells        a norm, patches side by side, then as mlp at that width        Qwen-VL
    """

    kind: ProjectorKind
    hidden: int  # of the decoder
    bias: bool = True
    activation: Activation = "gelu"
    merge: int = 1  # patches along a side that become one row
    norm_eps: float = 1e-6  # of a norm, where there is one


class VisionSpec(msgspec.Struct, frozen=True):
    family: str
    tower: TowerSpec
    projector: ProjectorSpec
    image_token: int  # the id that stands for one row
    sees: Sees = "before"  # what tokens of a picture see besides what stands before them
    axes: bool = False  # the decoder's rotary positions know rows and columns of pictures
    begin_token: int | None = None  # what a template writes for a picture, if not `image_token`
    end_token: int | None = None  # what stands behind the rows of a picture then
    video_token: int | None = None  # the id that stands for one row of a video; None: it takes none
    # What stands around each step of a video, behind its time; None: all steps are one run of rows.
    step_tokens: tuple[int, int] | None = None
    tokens_per_second: float = 0.0  # by which steps of a video are apart; 0: by one

    @property
    def cell(self) -> int:
        """Pixels along a side of what becomes one row."""
        return self.tower.patch * self.projector.merge

    def rows(self, height: int, width: int) -> int:
        """Rows of one tile of so many pixels."""
        return (height // self.cell) * (width // self.cell)

    def steps(self, tiles: int) -> int:
        """Tiles that the tower sees, of so many that were prepared: those of one patch are one."""
        return -(-tiles // self.tower.frames)

    @property
    def varies(self) -> str | None:
        """Why an answer may depend on the other requests of a step; None: it does not."""
        if self.axes:
            return "its rotary positions have three axes"
        return None if self.sees == "before" else "tokens of a picture see each other both ways"
