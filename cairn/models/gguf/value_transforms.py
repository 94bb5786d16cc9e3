"""Transformations that llama.cpp applies to tensor values, and their inverses.

Each transformation exists in both directions: `undo` for reading a file, `redo` for writing one. A `ValueTransform`
names the transformation and the sizes that it needs (heads, groups). This module knows neither names nor files.
"""

from typing import Literal

import msgspec
import torch
from torch import Tensor

from cairn.core.errors import ConfigError

Kind = Literal[
    "none",
    "rotary_rows",  # of each head: row i of one half, row i of the other, ...
    "plus_one",  # norms that multiply by 1 + w hold that sum
    "transposed",
    "one_channel",  # a convolution's kernels [C, K] are [C, 1, K] on the Hub
    "one_row",  # a vector is a matrix of one row on the Hub
    "negative_exp",  # -exp(A_log)
]
Along = Literal["rows", "columns"]


class HeadTiles(msgspec.Struct, frozen=True):
    """Value heads in the order that ggml broadcasts by: all first heads of the key heads' groups, then all second ones.

    The Hub has the value heads of one key head beside each other.
    """

    key_heads: int
    group: int  # value heads of one key head
    untouched: int = 0  # rows before the first value head, those of queries and keys
    along: Along = "rows"


class ValueTransform(msgspec.Struct, frozen=True):
    kind: Kind = "none"
    heads: int = 0  # whose rows were interleaved
    tiles: HeadTiles | None = None

    @property
    def moves_rows_only(self) -> bool:
        """Return whether the transformation can be undone on quantised rows."""
        in_rows = self.tiles is None or self.tiles.along == "rows"
        return self.kind in ("none", "rotary_rows") and in_rows

    @property
    def nothing(self) -> bool:
        return self.kind == "none" and self.tiles is None

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the Hugging Face tensor."""
        if self.kind == "one_channel":
            return (stored[0], 1, *stored[1:])
        if self.kind == "one_row":
            return (1, stored[-1])
        return stored[::-1] if self.kind == "transposed" else stored


def undo(change: ValueTransform, values: Tensor) -> Tensor:
    """Convert from the GGUF values to the Hugging Face values."""
    if change.tiles is not None:
        values = _move_heads(values, change.tiles, back=True)
    if change.kind == "rotary_rows":
        halves = values.view(change.heads, -1, 2, *values.shape[1:])
        return halves.transpose(1, 2).reshape(values.shape)
    if change.kind == "plus_one":
        return (values.float() - 1).to(values.dtype)
    if change.kind == "transposed":
        return values.permute(*range(values.ndim)[::-1]).contiguous()
    if change.kind == "one_channel":
        return values.unsqueeze(1)
    if change.kind == "negative_exp":
        return (-values.float()).log().to(values.dtype)
    return values.view(1, -1) if change.kind == "one_row" else values


def redo(change: ValueTransform, values: Tensor) -> Tensor:
    """Convert from the Hugging Face values to the GGUF values."""
    if change.kind == "transposed":
        raise ConfigError(
            "gpt2 models are not written as GGUF", hint="use a model of another family"
        )
    if change.kind == "rotary_rows":
        halves = values.reshape(change.heads, 2, -1, *values.shape[1:])
        values = halves.transpose(1, 2).reshape(values.shape).contiguous()
    elif change.kind == "plus_one":
        values = values + 1
    elif change.kind == "one_channel":
        values = values.squeeze(1)
    elif change.kind == "negative_exp":
        values = -values.float().exp()
    return values if change.tiles is None else _move_heads(values, change.tiles, back=False)


def _move_heads(values: Tensor, tiles: HeadTiles, back: bool) -> Tensor:
    if tiles.along == "columns":
        rows = msgspec.structs.replace(tiles, along="rows")
        return _move_heads(values.t(), rows, back).t().contiguous()
    head, tail = values[: tiles.untouched], values[tiles.untouched :]
    counts = (tiles.group, tiles.key_heads) if back else (tiles.key_heads, tiles.group)
    moved = tail.unflatten(0, (*counts, -1)).transpose(0, 1).flatten(0, 2)
    return torch.cat((head, moved)) if tiles.untouched else moved


def join_latent(keys_HRC: Tensor, values_HVR: Tensor) -> Tensor:
    """DeepSeek's matrix that expands latents, of the two that llama.cpp multiplies with apart, keys transposed."""
    by_head = torch.cat((keys_HRC.transpose(1, 2), values_HVR), dim=1)
    return by_head.flatten(0, 1).contiguous()


def join_key_heads(qkv_ND: Tensor, gate_MD: Tensor, key_heads: int) -> Tensor:
    """Qwen3-Next's matrix, which has q, k, v and gate of one key head beside each other, of q, k, v and the gates."""
    columns = (qkv_ND.shape[0] - gate_MD.shape[0]) // 2
    parts = (*qkv_ND.split((columns, columns, gate_MD.shape[0])), gate_MD)
    by_head = torch.cat([part.unflatten(0, (key_heads, -1)) for part in parts], dim=1)
    return by_head.flatten(0, 1)
