"""AdamW that remembers in 8 bits: a quarter of the memory of float32 states.

A block of 256 neighbours in a row shares a scale, its largest magnitude. Within a block, what is stored is a root, so
that small values keep their relative precision (equal steps would round most of v to zero, and a division by it blows
up):

    m = sign * (|q| / 127)^3 * scale      int8      down to 5e-7 of the block's largest
    v = (q / 255)^4 * scale               uint8     down to 2e-10; never 0 unless it is 0

Vectors (norms, biases) are few and keep float32. Weights of 16 bits without masters are rounded at random. Rows are
updated a few million elements at a time, so the float32 copies stay small. Plain torch; knows no schedule.
"""

import hashlib
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.kernels.optim.adamw import Step
from cairn.train.config import Optim
from cairn.train.optim.adamw import AdamW, by_decay, is_matrix
from cairn.train.parallel.layout import SHARED_SCALE as BLOCK

ROWS_TOGETHER = 1 << 24  # elements


def blocks(columns: int) -> int:
    return -(-columns // BLOCK)


def pack(x: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """x [..., C] float32 -> codes of its shape, scales [..., C / 256]."""
    cut = F.pad(x, (0, blocks(x.shape[-1]) * BLOCK - x.shape[-1])).unflatten(-1, (-1, BLOCK))
    scale = cut.abs().amax(-1)
    share = (cut / scale.clamp(min=1e-38)[..., None]).abs()
    if signed:
        codes = (share.pow(1 / 3) * 127).round().clamp(max=127) * cut.sign()
    else:
        codes = (share.pow(1 / 4) * 255).round().clamp(max=255)
        codes = torch.where((cut > 0) & (codes == 0), 1.0, codes)
    codes = codes.flatten(-2)[..., : x.shape[-1]]
    return codes.to(torch.int8 if signed else torch.uint8), scale


def unpack(codes: Tensor, scale: Tensor) -> Tensor:
    signed = codes.dtype == torch.int8
    wide = codes.float() / (127 if signed else 255)
    grown = wide.pow(3) if signed else wide.pow(4)
    return grown * scale.repeat_interleave(BLOCK, dim=-1)[..., : codes.shape[-1]]


class AdamW8:
    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: Optim, masters: bool, seed: int = 0
    ) -> None:
        matrices = {n: p for n, p in parameters.items() if is_matrix(n, p)}
        vectors = {n: p for n, p in parameters.items() if n not in matrices}
        self.vectors = AdamW(vectors, settings, masters=True, seed=seed)  # few: nothing to save
        self.parameters, self.settings, self.seed = matrices, settings, seed
        self.m = {n: torch.zeros_like(p, dtype=torch.int8) for n, p in matrices.items()}
        self.v = {n: torch.zeros_like(p, dtype=torch.uint8) for n, p in matrices.items()}
        self.m_scale = {n: _scales(p) for n, p in matrices.items()}
        self.v_scale = {n: _scales(p) for n, p in matrices.items()}
        narrow = masters and any(p.dtype != torch.float32 for p in matrices.values())
        self.masters = {n: p.detach().float() for n, p in matrices.items()} if narrow else {}

    def update(
        self, gradients: Mapping[str, Tensor], number: int, lr: float, factor: Tensor
    ) -> None:
        self.vectors.update(gradients, number, lr, factor)
        options = self.settings
        for decay, names in by_decay(self.parameters).items():
            weight_decay = options.weight_decay if decay else 0.0
            step = Step(number, lr, options.beta1, options.beta2, options.eps, weight_decay)
            for name in names:
                if name in gradients:
                    self._update(name, gradients[name], step, factor)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        own = {"m8": self.m, "v8": self.v, "m8.scale": self.m_scale, "v8.scale": self.v_scale}
        own |= {"master8": self.masters} if self.masters else {}
        return self.vectors.tensors() | own

    def _update(self, name: str, grad: Tensor, step: Step, factor: Tensor) -> None:
        beta1, beta2, eps, kept, size, root = step.coefficients()
        fine = factor.isfinite()
        weight, source = self.parameters[name].data, self.masters.get(name)
        generator = _generator(self.seed, step.number, name, weight.device)
        for part in _parts(weight):
            g = torch.where(fine, grad[part].float() * factor, 0.0)
            m = unpack(self.m[name][part], self.m_scale[name][part])
            v = unpack(self.v[name][part], self.v_scale[name][part])
            m, v = torch.lerp(m, g, 1 - beta1), v * beta2 + g * g * (1 - beta2)
            old = (weight if source is None else source)[part]
            new = old.float() * kept - size * (m / (v.sqrt() * root + eps))
            stored = (*pack(m, True), *pack(v, False))
            homes = (self.m[name], self.m_scale[name], self.v[name], self.v_scale[name])
            for home, value in zip(homes, stored, strict=True):
                home[part] = torch.where(fine, value, home[part])
            new = torch.where(fine, new, old.float())
            if source is not None:
                source[part] = new
                weight[part] = new.to(weight.dtype)
            else:
                weight[part] = rounded_at_random(new, weight.dtype, generator)


def rounded_at_random(x: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Stochastic rounding to bfloat16; other dtypes are converted as usual."""
    if dtype != torch.bfloat16:
        return x.to(dtype)
    noise = torch.randint(
        0, 1 << 16, x.shape, generator=generator, device=x.device, dtype=torch.int32
    )
    return (x.view(torch.int32) + noise & -65536).view(torch.float32).to(dtype)


def _generator(seed: int, number: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{number}:{name}".encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little"))


def _scales(parameter: Tensor) -> Tensor:
    shape = (*parameter.shape[:-1], blocks(parameter.shape[-1]))
    return torch.zeros(shape, device=parameter.device)


def _parts(weight: Tensor) -> Iterator[slice]:
    rows = max(1, ROWS_TOGETHER // weight[0].numel())
    for begin in range(0, len(weight), rows):
        yield slice(begin, begin + rows)
