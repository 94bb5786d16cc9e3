"""Scales of float8 keys and values: two numbers for each layer, on the device.

    from the checkpoint    where it has them
    from the first prompts the largest key and value that a layer computes, with room for larger ones to come

A graph reads them where they lie, so it can be captured before they are known. They are fixed before the first token is
stored: pages that were filled under one scale are never read under another. Twice the largest value costs nothing,
because float8 has the same relative precision over fifteen powers of two.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.core.errors import ConfigError

LARGEST_E4M3 = 448.0
HEADROOM = 2.0  # how much larger than in the first prompts a value may become
SMALLEST = 1e-12


class CacheScales:
    def __init__(
        self,
        layers: int,
        device: torch.device | str,
        scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        """`known`: of each layer, for keys and for values."""
        self.factors_L2 = torch.ones(layers, 2, dtype=torch.float32, device=device)
        self.is_known = scales is not None
        self.are_measured = scales is None  # by this engine alone: another one's differ
        if scales is not None:
            self._take(scales)
        self._layers = [(row[:1], row[1:]) for row in self.factors_L2]

    def _take(self, scales: Sequence[tuple[float, float]]) -> None:
        factors = torch.tensor(scales, dtype=torch.float32)
        if factors.shape != self.factors_L2.shape or not (factors.isfinite() & (factors > 0)).all():
            raise ConfigError(
                f"cache scales of {list(factors.shape)} numbers that are not all above 0",
                hint=f"the model has {len(self.factors_L2)} layers, with one for keys and one for values each",
            )
        self.factors_L2.copy_(factors)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Scales of a layer's keys and values, each float32 [1]."""
        return self._layers[layer]

    def measure(self, layer: int, k_TKC: Tensor, v_TKC: Tensor) -> None:
        """Calibrate the scales from the first prompts without synchronising with the device."""
        for scale_1, values in zip(self.of_layer(layer), (k_TKC, v_TKC), strict=True):
            largest = values.abs().amax().float().clamp(min=SMALLEST)
            scale_1.copy_(largest * (HEADROOM / LARGEST_E4M3))

    def note(self) -> str:
        source = (
            "the checkpoint"
            if not self.are_measured
            else "the first prompts: the checkpoint has none"
        )
        return f"keys and values in float8, with a scale for each layer from {source}"
