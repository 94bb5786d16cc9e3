"""A decode step in two halves on two streams: while one half's attention reads the cache, the other's products compute.

    one stream    products | attention of all rows ...... | products | attention of all rows ...... |
    two streams   products | attention ....... | products | attention ....... | products |
                  products            | attention ....... | products | attention ....... | products |

Attention is bound by the memory, and products of so few rows by latency: one after the other each leaves the chip idle
in its own way. The halves are independent forward passes over different rows, so the result is the same; what they
have in common, the weights, is read twice, which pays only where a model is small beside its cache.

Left alone both would compute at the same time and then both read: nothing pulls them apart, and nothing pulls them
together either. So the second half's first attention waits for the first half's, and they stay out of step to the end.
In a CUDA graph the two streams become two branches. CAIRN_HALVES=0 switches it off, to see what it is worth.
"""

import copy
import os
from typing import cast

import torch
from torch import Tensor

from cairn.kernels.matmul.skinny_plans import BESIDE_8_BITS, BESIDE_RING
from cairn.kernels.paged.paged_parts import Workspace
from cairn.models.fused import Fused
from cairn.models.spec import ModelSpec
from cairn.serve.engine.gpu_pages import PagedOnGPU
from cairn.serve.engine.pages import Paged

FEWEST = 96  # rows of a step that is worth two halves
FEWEST_8_BITS = 64  # the same with a float8 cache
MOST_HALF = 128  # rows of a half: what the kernels that share the chip take
STEP = 8  # rows that a half is a multiple of: addresses stay multiples of 16 bytes


def suits(spec: ModelSpec, fused: Fused | None) -> bool:
    """Is there a form of every kernel that leaves room for others?"""
    if fused is None or os.environ.get("CAIRN_HALVES") == "0" or not fused.small(MOST_HALF):
        return False
    plain = not any(spec.windows) and not spec.attention_softcap and not spec.sinks
    return plain and spec.head_dim in (64, 128) and spec.heads // spec.kv_heads <= 16


class First:
    """Says when its first attention has ended."""

    def __init__(self) -> None:
        self.ended: torch.cuda.Event | None = None

    def before(self) -> None: ...

    def after(self) -> None:
        if self.ended is None:
            self.ended = torch.cuda.Event()
            self.ended.record()


class Second:
    """Waits for that before its own first."""

    def __init__(self, first: First, fence: Tensor) -> None:
        """`fence`: any tensor, of which a copy is computed behind the event."""
        self.first, self.fence, self.waited = first, fence, False

    def before(self) -> None:
        if not self.waited and self.first.ended is not None:
            torch.cuda.current_stream().wait_event(self.first.ended)
            # The next kernel may start before its predecessor has ended (programmatic dependent launch). So there
            # has to be a predecessor that waits for the event: this one, of which nothing else is read.
            self.fence.add(0)
        self.waited = True

    def after(self) -> None: ...


class TwoBatchOverlap:
    """Called as the model, with the attend of all rows."""

    def __init__(
        self, fused: Fused, workspaces: tuple[Workspace, Workspace], float8: bool = False
    ) -> None:
        """`float8`: the cache, whose attention is short and leaves other room."""
        self.model = fused.sharing_the_chip(BESIDE_8_BITS if float8 else BESIDE_RING)
        self.workspaces, self.fewest = workspaces, FEWEST_8_BITS if float8 else FEWEST
        self.side = torch.cuda.Stream()

    def warming(self) -> "TwoBatchOverlap":
        """The same through the first layers alone (`Fused.warming`)."""
        twin = copy.copy(self)
        twin.model = self.model.warming()
        return twin

    def worth(self, rows: int) -> bool:
        return self.fewest <= rows <= 2 * MOST_HALF

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attend: Paged) -> Tensor:
        whole, rows = cast(PagedOnGPU, attend), len(tokens_T)
        half = -(-rows // (2 * STEP)) * STEP
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        first = First()
        part = whole.part(slice(0, half), self.workspaces[0], first)
        first_TD = self.model(tokens_T[:half], positions_T[:half], part)
        with torch.cuda.stream(self.side):
            second = Second(first, tokens_T[half:])
            part = whole.part(slice(half, rows), self.workspaces[1], second)
            second_TD = self.model(tokens_T[half:], positions_T[half:], part)
        main.wait_stream(self.side)
        return torch.cat((first_TD, second_TD))
