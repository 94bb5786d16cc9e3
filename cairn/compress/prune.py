"""A model with zeros in place of many weights, layer by layer, each on the output of the pruned layers before it."""

from collections.abc import Callable
from typing import Literal

import msgspec
import torch
from torch import Tensor

from cairn.compress.layer_by_layer import MatrixSite, walk
from cairn.compress.prune_masks import magnitude, sparsegpt, wanda
from cairn.core.errors import ConfigError
from cairn.models.transformer import Transformer

Method = Literal["magnitude", "wanda", "sparsegpt"]


class Sparsity(msgspec.Struct, frozen=True, kw_only=True):
    """Target sparsity: a share of each matrix, or all but n of each m neighbours."""

    method: Method
    share: float = 0.5
    pattern: tuple[int, int] | None = None

    def words(self) -> str:
        if self.pattern is not None:
            return f"{self.pattern[0]}:{self.pattern[1]}"
        return f"{self.share:.0%}"


class PrunedMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of pruning on a matrix: |error| / |output| on rows of the calibration text."""

    matrix: str
    error: float
    zeros: float  # share of weights


def read_pattern(text: str, widths: list[int]) -> tuple[int, int]:
    """ "2:4" as numbers that fit the matrices."""
    kept, _, of = text.partition(":")
    if not (kept.isdigit() and of.isdigit()) or not 0 < int(kept) < int(of):
        raise ConfigError(
            f"{text!r} is not a pattern", hint="n:m keeps n of each m neighbours, such as 2:4"
        )
    odd = [k for k in widths if k % int(of)]
    if odd:
        raise ConfigError(
            f"groups of {of} do not divide rows of {odd[0]} values", hint="use another pattern"
        )
    return int(kept), int(of)


def prune_model(
    model: Transformer,
    windows_BL: Tensor,
    sparsity: Sparsity,
    advance: Callable[[str], None] = lambda words: None,
    chunk_windows: int = 8,
) -> list[PrunedMatrix]:
    """Prune every matrix of the layers; embedding, head and routers stay as they are."""
    made: list[PrunedMatrix] = []
    for walked in walk(model, windows_BL, sparsity.method == "sparsegpt", chunk_windows):
        for site in walked.sites:
            made.append(_prune(site, sparsity))
        worst = max(made[-len(walked.sites) :], key=lambda one: one.error)
        advance(f"{worst.matrix.split('.', 2)[2]} {worst.error:.4f}")
    return made


@torch.no_grad()
def _prune(site: MatrixSite, sparsity: Sparsity) -> PrunedMatrix:
    before_NK = site.matrix.read().float()
    after_NK = pruned(site, before_NK, sparsity)
    site.matrix.write(after_NK)
    x_MK = site.inputs.sample_MK.float()
    lost_MN, wanted_MN = x_MK @ (after_NK - before_NK).t(), x_MK @ before_NK.t()
    return PrunedMatrix(
        matrix=site.matrix.name,
        error=float(lost_MN.norm() / wanted_MN.norm().clamp(min=1e-30)),
        zeros=float((after_NK == 0).float().mean()),
    )


def pruned(site: MatrixSite, w_NK: Tensor, sparsity: Sparsity) -> Tensor:
    """The matrix of a site, with zeros."""
    share, pattern = sparsity.share, sparsity.pattern
    if sparsity.method == "magnitude":
        return magnitude(w_NK, share, pattern)
    if sparsity.method == "wanda":
        return wanda(w_NK, site.inputs.norm_K, share, pattern)
    return sparsegpt(w_NK, site.inputs.hessian_KK, share, pattern, site.matrix.name)
