"""Rotary positions: by which angle is each pair of dimensions turned at each position?

Five ways to stretch the angles beyond the trained context: linear (positions shrink), dynamic NTK (the base
grows with the sequence), Llama-3 (low frequencies shrink), YaRN (a ramp between the two, arXiv:2309.00071) and
longrope (a divisor for each frequency was searched for: one set up to the trained length, one beyond it; the model's
context decides between them, so that all keys of a sequence are rotated alike). Where only some columns of a head are
rotated, the others are pairs of frequency 0: loading has put the columns in this order (`checkpoint_names`).
All angles are float32; only the rotation itself happens in the activations' type.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.models.spec import ModelSpec, Rope


class Rotation:
    """Cosines and sines for one forward pass, [T, 1, C]: the same for every head."""

    def __init__(
        self, cos_T1C: Tensor, sin_T1C: Tensor, temperature_T11: Tensor | None = None
    ) -> None:
        """`temperature_T11`: what queries are multiplied with."""
        self.cos_T1C, self.sin_T1C, self.temperature_T11 = cos_T1C, sin_T1C, temperature_T11

    def __call__(self, x_THC: Tensor) -> Tensor:
        """Dimension i is paired with i + C/2, as checkpoints in Hugging Face's format expect."""
        low, high = x_THC.chunk(2, dim=-1)
        return x_THC * self.cos_T1C + torch.cat((-high, low), dim=-1) * self.sin_T1C


def rotation(
    rope: Rope,
    spec: ModelSpec,
    positions_T: Tensor,
    lengths_T: Tensor | None,
    dtype: torch.dtype,
    axes_3T: Tensor | None = None,
) -> Rotation:
    """`lengths_T`: how long each token's sequence is by now; only dynamic scaling asks.

    `axes_3T`: frame, row and column of each token, for a rope with sections; None: all three are the position.
    """
    angles, amplitude = frequencies(rope, spec, positions_T.device, lengths_T)
    places_Tc = positions_T[:, None]
    if rope.sections and axes_3T is not None:
        places_Tc = axes_3T[axis_of_pairs(rope).to(axes_3T.device)].t()
    angles_T1c = (places_Tc.float() * angles)[:, None]
    cos_T1c, sin_T1c = angles_T1c.cos() * amplitude, angles_T1c.sin() * amplitude
    return Rotation(
        torch.cat((cos_T1c, cos_T1c), dim=-1).to(dtype),
        torch.cat((sin_T1c, sin_T1c), dim=-1).to(dtype),
        _temperature(rope, positions_T).to(dtype) if rope.temperature else None,
    )


def axis_of_pairs(rope: Rope) -> Tensor:
    """Axis of each pair of columns: 0 frame, 1 row, 2 column (M-RoPE, arXiv:2409.12191)."""
    pairs = sum(rope.sections)
    if not rope.interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(rope.sections))
    axis_c = torch.zeros(pairs, dtype=torch.long)
    for axis in (1, 2):
        axis_c[axis : 3 * rope.sections[axis] : 3] = axis
    return axis_c


def rows_by_axes(table_PC: Tensor, axes_3T: Tensor, axis_C: Tensor) -> Tensor:
    """Rows [T, C] of a position table for each token, with every column at the token's position on its axis.

    Numbers beyond the table, which `check_request` refuses, take its last row: a GPU would end the process.
    """
    return table_PC.gather(0, axes_3T[axis_C].t().long().clamp(max=len(table_PC) - 1))


def axis_of_columns(rope: Rope, columns: int) -> Tensor:
    """The axis of both columns of each pair, [C]; those that are not rotated have the first."""
    axis_c = axis_of_pairs(rope) if rope.sections else torch.zeros(0, dtype=torch.long)
    axis_c = F.pad(axis_c, (0, columns // 2 - len(axis_c)))
    return torch.cat((axis_c, axis_c))


def _temperature(rope: Rope, positions_T: Tensor) -> Tensor:
    contexts_T11 = (positions_T[:, None, None] // rope.original_context).float()
    return 1.0 + rope.temperature * torch.log1p(contexts_T11)


def frequencies(
    rope: Rope, spec: ModelSpec, device: torch.device, lengths_T: Tensor | None = None
) -> tuple[Tensor, float | Tensor]:
    """Radians per position for each pair, [C/2] (dynamic: [T, C/2]), and a factor on cos and sin, or one per pair."""
    angles, amplitude = _rotated(rope, spec, device, lengths_T)
    still = spec.rotary_dim // 2 - angles.shape[-1]
    if not still:
        return angles, amplitude
    amplitudes = torch.full(angles.shape[-1:], amplitude, device=device)
    return F.pad(angles, (0, still)), F.pad(amplitudes, (0, still), value=1.0)


def _rotated(
    rope: Rope, spec: ModelSpec, device: torch.device, lengths_T: Tensor | None
) -> tuple[Tensor, float]:
    """The same for the pairs that are rotated."""
    size = rope.rotated or spec.rotary_dim
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    trained = rope.original_context or spec.context
    if rope.kind == "dynamic" and lengths_T is not None:
        return _dynamic(rope, exponents, size, trained, lengths_T), 1.0
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain, trained), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, size, trained), _yarn_amplitude(rope)
    if rope.kind == "longrope":
        factors = rope.long_factors if spec.context > trained else rope.short_factors
        divisors = torch.tensor(factors, dtype=torch.float32, device=device)
        return 1.0 / (divisors * rope.theta**exponents), _longrope_amplitude(rope)
    return plain, 1.0


def _dynamic(rope: Rope, exponents: Tensor, size: int, trained: int, lengths_T: Tensor) -> Tensor:
    stretch = (rope.factor * lengths_T.clamp(min=trained) / trained) - (rope.factor - 1)
    theta_T = rope.theta * stretch.float() ** (size / (size - 2))
    return 1.0 / theta_T[:, None] ** exponents


def _llama3(rope: Rope, plain: Tensor, trained: int) -> Tensor:
    wavelength = 2 * math.pi / plain
    longest_kept = trained / rope.high_freq_factor
    shortest_shrunk = trained / rope.low_freq_factor
    blend = (trained / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - blend) * plain / rope.factor + blend * plain
    stretched = torch.where(wavelength > shortest_shrunk, plain / rope.factor, between)
    return torch.where(wavelength < longest_kept, plain, stretched)


def _yarn(rope: Rope, plain: Tensor, size: int, trained: int) -> Tensor:
    def dimension(turns: float) -> float:
        """The dimension with this number of rotations over the trained context."""
        return size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = torch.arange(size // 2, dtype=torch.float32, device=plain.device)
    shrunk = ((ramp - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * shrunk + plain * (1 - shrunk)


def _yarn_amplitude(rope: Rope) -> float:
    def amplitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return amplitude(rope.mscale) / amplitude(rope.mscale_all_dim)
    return amplitude(1.0)


def _longrope_amplitude(rope: Rope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_context))
