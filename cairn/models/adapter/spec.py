"""Adapter specification: target linear maps, rank and scaling. Pure data; no torch.

    W x   ->   W x + scale * B (A x)          scale = alpha / rank, or alpha / sqrt(rank) (rsLoRA, arXiv:2312.03732)

Names are those of a checkpoint in Hugging Face's format, as PEFT writes them: `model.layers.3.self_attn.q_proj`. A
pattern of `ranks` and `alphas` fits a name that ends with it at a dot; `targets` as well, or it is one regular
expression for whole names, or `all-linear`.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

from cairn.core.errors import ConfigError

ALL_LINEAR = "all-linear"
OUTSIDE = ("lm_head", "embed_tokens", "wte")  # not a part of all-linear


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A low-rank adapter of a model."""

    rank: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 16
    alpha: float = 32.0
    targets: tuple[str, ...] | str = ALL_LINEAR  # suffixes; or one regular expression
    exclude: tuple[str, ...] | str = ()
    layers: tuple[int, ...] = ()  # only these; empty: all
    rslora: bool = False
    dora: bool = False  # arXiv:2402.09353
    ranks: dict[str, int] = {}  # by pattern, instead of `rank`
    alphas: dict[str, float] = {}

    def covers(self, name: str) -> bool:
        """Return whether the linear map with this checkpoint name gets an adapter."""
        if self.layers:
            number = re.search(r"\.(?:layers|h)\.(\d+)\.", name)
            if number is None or int(number.group(1)) not in self.layers:
                return False
        if _fits(self.exclude, name):
            return False
        if self.targets == ALL_LINEAR:
            return not any(_ends(name, outside) for outside in OUTSIDE)
        return _fits(self.targets, name)

    def rank_of(self, name: str) -> int:
        return int(_by_pattern(self.ranks, name, self.rank))

    def scale_of(self, name: str) -> float:
        rank, alpha = self.rank_of(name), _by_pattern(self.alphas, name, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def check_targets(spec: AdapterSpec, names: Iterable[str]) -> None:
    """Refuses ranks below 1 and targets that no map of the model fits."""
    for pattern, rank in {"": spec.rank, **spec.ranks}.items():
        if rank < 1:
            where = f" for {pattern}" if pattern else ""
            raise ConfigError(f"adapter rank {rank}{where}", hint="a rank is 1 or more")
    names = sorted(names)
    if isinstance(spec.targets, str):
        missing = [] if any(spec.covers(name) for name in names) else [spec.targets]
    else:
        missing = [t for t in spec.targets if not any(_ends(name, t) for name in names)]
    if missing or not any(spec.covers(name) for name in names):
        last = sorted({name.rpartition(".")[2] for name in names})
        what = f"{missing[0]!r} fits" if missing else "the targets fit"
        raise ConfigError(
            f"{what} no linear map of this model", hint=f"its maps are {', '.join(last)}"
        )


def _fits(patterns: tuple[str, ...] | str, name: str) -> bool:
    if isinstance(patterns, str):
        return re.fullmatch(patterns, name) is not None
    return any(_ends(name, pattern) for pattern in patterns)


def _ends(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith(f".{suffix}")


def _by_pattern(patterns: Mapping[str, float], name: str, default: float) -> float:
    """The first pattern that fits, as PEFT reads them: a regular expression for the end of the name."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default
