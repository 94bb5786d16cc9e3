"""Experts that a checkpoint stores in one tensor, under the names that one expert each would have.

    experts.gate_up_proj       [E, D, 2F]   columns of gate and up alternate     -> experts.N.gate_proj.weight [F, D] ..
    experts.gate_up_proj_bias  [E, 2F]                                           -> experts.N.gate_proj.bias [F] ..
    experts.down_proj          [E, F, D]                                          -> experts.N.down_proj.weight [D, F]
    experts.down_proj_bias     [E, D]                                            -> experts.N.down_proj.bias [D]

This is how gpt-oss stores them, in floating point; its blocks in MXFP4 are read by `quantized.source`. Other families
that are stored stacked, as Qwen3.5 is, have gate_up_proj [E, 2F, D], up behind gate, and down_proj [E, D, F].
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cairn.models.safetensors_file import TensorSource
from cairn.models.spec import ModelSpec

STACKED_FAMILIES = ("gpt_oss",)
STACKED = re.compile(r"(?P<at>.*\.experts)\.(?P<name>gate_up_proj|down_proj)(?P<bias>_bias)?$")
ONE = re.compile(
    r"(?P<at>.*\.experts)\.(?P<n>\d+)\.(?P<part>gate|up|down)_proj\.(?P<kind>weight|bias)$"
)
PARTS = {
    "gate_up_proj": {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)},
    "down_proj": {"down_proj": slice(None)},
}


class _Piece(NamedTuple):
    tensor: str
    expert: int
    outputs: slice
    transposed: bool  # as gpt-oss has them: outputs come last

    def of(self, stacked: Tensor) -> Tensor:
        one = stacked[self.expert]
        return one[..., self.outputs].t() if self.transposed else one[self.outputs]

    def shape(self, stacked: tuple[int, ...]) -> tuple[int, ...]:
        _, *inputs, outputs = stacked if self.transposed else (stacked[0], *stacked[:0:-1])
        return (len(range(*self.outputs.indices(outputs))), *inputs)


class SplitExperts:
    """A checkpoint's tensors, with stacked experts one by one."""

    def __init__(self, files: TensorSource, family: str) -> None:
        self.files, self.transposed = files, family in STACKED_FAMILIES
        self._pieces: dict[str, _Piece] = {}
        self._others: list[str] = []
        for name in files.names():
            match = STACKED.fullmatch(name)
            if match is None:
                self._others.append(name)
                continue
            kind = "bias" if match["bias"] else "weight"
            for part, outputs in self._parts(name, match["name"]).items():
                for expert in range(files.shape(name)[0]):
                    at = f"{match['at']}.{expert}.{part}.{kind}"
                    self._pieces[at] = _Piece(name, expert, outputs, self.transposed)

    def _parts(self, name: str, kind: str) -> dict[str, slice]:
        """Slices of a stacked tensor that belong to gate, up and down."""
        if self.transposed or kind == "down_proj":
            return PARTS[kind]
        middle = self.files.shape(name)[1] // 2
        return {"gate_proj": slice(middle), "up_proj": slice(middle, None)}

    def names(self) -> list[str]:
        return [*self._others, *self._pieces]

    def shape(self, name: str) -> tuple[int, ...]:
        piece = self._pieces.get(name)
        return (
            self.files.shape(name) if piece is None else piece.shape(self.files.shape(piece.tensor))
        )

    def dtype(self, name: str) -> torch.dtype:
        piece = self._pieces.get(name)
        return self.files.dtype(name if piece is None else piece.tensor)

    def tensor(self, name: str) -> Tensor:
        piece = self._pieces.get(name)
        if piece is None:
            return self.files.tensor(name)
        return piece.of(self.files.tensor(piece.tensor))


def split_experts(files: TensorSource, family: str) -> TensorSource:
    """The same source where no experts are stacked."""
    stacked = any(STACKED.fullmatch(name) for name in files.names())
    return SplitExperts(files, family) if stacked else files


def stack_experts(
    tensors: Iterator[tuple[str, Tensor]], spec: ModelSpec
) -> Iterator[tuple[str, Tensor]]:
    """The way back: tensors of single experts as one for all of them, when the last of a layer has come."""
    waiting: dict[str, dict[tuple[int, str], Tensor]] = {}
    count = spec.experts.count if spec.experts else 0
    for name, tensor in tensors:
        match = ONE.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        parts = ("down",) if match["part"] == "down" else ("gate", "up")
        suffix = "_bias" if match["kind"] == "bias" else ""
        stacked = f"{match['at']}.{'_'.join(parts)}_proj{suffix}"
        parts_here = waiting.setdefault(stacked, {})
        parts_here[int(match["n"]), match["part"]] = tensor.t()
        if len(parts_here) == count * len(parts):
            parts_here = waiting.pop(stacked)
            yield stacked, _stacked([[parts_here[n, part] for part in parts] for n in range(count)])


def _stacked(experts: list[list[Tensor]]) -> Tensor:
    """[E, .., columns], where columns of several parts alternate."""
    return torch.stack([torch.stack(parts, dim=-1).flatten(-2) for parts in experts]).contiguous()
