"""The parts of a decoder layer: linear maps that can be split over ranks, norms, feed-forward, attention.

Everything works on packed tokens [T, D], under autograd and without, alone or as one of several shards.
Several linear maps of one input (q, k, v; gate, up) exist in two forms that compute the same: separate, as
checkpoints store them, so that a weight can stay a view of the mapped file; or fused into one matrix, so that
a GPU runs one larger product. Whoever serves may hang a third form beside the weights: `packed`, in few bits, which
then multiplies in their place. No layer reads a file or knows a checkpoint's names: each tells through `slots`
which tensors it needs and where they go.
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.models.attend import Attend, Rule
from cairn.models.rope import Rotation
from cairn.models.shards import ALONE, Shards, even_share
from cairn.models.spec import Activation, ModelSpec


class Slot(NamedTuple):
    """One tensor that a checkpoint has to provide, and its place in the model on this rank."""

    name: str  # the same whatever the layout: "layers.0.attention.qkv.q.weight"
    parameter: str  # path of the parameter that holds it
    shape: tuple[int, ...]  # of the whole tensor
    index: tuple[int | slice, ...] = ()  # which part of the parameter it fills; (): all of it
    cut: tuple[int, int, int] | None = None  # this rank's share: dimension, start, stop; None: all
    init: Literal["normal", "ones", "zeros"] = "normal"

    def under(self, path: str) -> "Slot":
        return self._replace(name=f"{path}.{self.name}", parameter=f"{path}.{self.parameter}")

    def share(self, whole: Tensor) -> Tensor:
        """The part of the whole tensor that belongs to this rank."""
        return whole if self.cut is None else whole.narrow(*self._narrow())

    def _narrow(self) -> tuple[int, int, int]:
        dimension, start, stop = self.cut or (0, 0, 0)
        return dimension, start, stop - start


class Holder(nn.Module):
    """A layer that holds tensors of a checkpoint."""

    def slots(self) -> Iterator[Slot]:
        raise NotImplementedError


class Build(NamedTuple):
    """How a model is laid out: on which device and in which type, split how, fused or not."""

    device: torch.device | str = "meta"
    dtype: torch.dtype = torch.float32
    shards: Shards = ALONE
    fused: bool = False

    def parameter(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, device=self.device, dtype=self.dtype))


# Rows for which a matrix that lies by columns can be faster; one row is not, and many do not care.
FEW = range(2, 193)


Product = Callable[[Tensor], Tensor]  # x_MK @ weight_NK.T, whatever form the weight has


def linear(
    x: Tensor, weight: Tensor, turned: Tensor | None, packed: Product | None = None
) -> Tensor:
    """x @ weight.T. `turned`: the same matrix laid out by columns; some CPUs multiply several rows with it faster."""
    if packed is not None:
        return packed(x)
    return F.linear(x, weight if turned is None or len(x) not in FEW else turned)


class Weights(nn.Module):
    """A matrix and perhaps a bias, without an opinion on how they are used."""

    def __init__(self, build: Build, rows: int, columns: int, bias: bool) -> None:
        super().__init__()
        self.weight = build.parameter(rows, columns)
        self.bias = build.parameter(rows) if bias else None


class Columns(Holder):
    """Linear maps of one input, each split over the shards by its outputs."""

    # All parts in one matrix that lies by columns; see `linear`. Whoever serves on a CPU may set them.
    turned: Tensor | None = None
    joined_bias: Tensor | None = None
    packed: Product | None = None  # all parts in one matrix, in few bits

    def __init__(self, build: Build, width: int, parts: dict[str, int], bias: bool) -> None:
        super().__init__()
        self.shards, self.width, self.parts, self.with_bias = build.shards, width, parts, bias
        self.rows = {name: even_share(n, build.shards, f"rows of {name}")
                     for name, n in parts.items()}  # fmt: skip
        self.fused = Weights(build, sum(self.rows.values()), width, bias) if build.fused else None
        if not build.fused:
            for name, rows in self.rows.items():
                self.add_module(name, Weights(build, rows, width, bias))

    def forward(self, x_TD: Tensor) -> list[Tensor]:
        x_TD = self.shards.enter(x_TD)
        joined = self._at_once(x_TD)
        if joined is not None:
            return list(joined.split(list(self.rows.values()), dim=-1))
        return [F.linear(x_TD, part.weight, part.bias) for part in self.separate()]

    def joined(self, x_TD: Tensor) -> Tensor:
        """The results of all parts side by side, without gradients."""
        joined = self._at_once(x_TD)
        if joined is not None:
            return joined
        return torch.cat([F.linear(x_TD, part.weight, part.bias) for part in self.separate()], -1)

    def _at_once(self, x_TD: Tensor) -> Tensor | None:
        """Through one matrix, if there is one of all parts for so many rows."""
        if self.packed is not None:
            joined = self.packed(x_TD)
            return joined if self.joined_bias is None else joined.add_(self.joined_bias)
        if self.turned is not None and len(x_TD) in FEW:
            return F.linear(x_TD, self.turned, self.joined_bias)
        if self.fused is not None:
            return F.linear(x_TD, self.fused.weight, self.fused.bias)
        return None

    def separate(self) -> list[Weights]:
        """The parts, each with its own matrix; none if they are fused."""
        return (
            [] if self.fused is not None else [cast(Weights, self._modules[n]) for n in self.parts]
        )

    def slots(self) -> Iterator[Slot]:
        start = 0
        for name, rows in self.rows.items():
            total, first = self.parts[name], rows * self.shards.rank
            cut = (0, first, first + rows) if rows != total else None
            index = (slice(start, start + rows),) if self.fused else ()
            holder = "fused" if self.fused else name
            yield Slot(f"{name}.weight", f"{holder}.weight", (total, self.width), index, cut)
            if self.with_bias:
                yield Slot(f"{name}.bias", f"{holder}.bias", (total,), index, cut, "zeros")
            start += rows


class Rows(Holder):
    """A linear map split over the shards by its inputs; the partial results are summed."""

    turned: Tensor | None = None
    packed: Product | None = None

    def __init__(self, build: Build, width: int, out: int, bias: bool) -> None:
        local = even_share(width, build.shards, "input columns")
        super().__init__()
        self.shards, self.shape = build.shards, (out, width)
        self.weight = build.parameter(out, local)
        self.bias = build.parameter(out) if bias else None

    def forward(self, x_TF: Tensor) -> Tensor:
        y_TD = self.shards.reduce(linear(x_TF, self.weight, self.turned, self.packed))
        return y_TD if self.bias is None else y_TD + self.bias  # once, not once per shard

    def slots(self) -> Iterator[Slot]:
        local = self.weight.shape[1]
        first = local * self.shards.rank
        cut = (1, first, first + local) if local != self.shape[1] else None
        yield Slot("weight", "weight", self.shape, cut=cut)
        if self.bias is not None:
            yield Slot("bias", "bias", self.shape[:1], init="zeros")


class Vocabulary(Holder):
    """One row per token: looked up going in, multiplied with going out; split over the shards by rows.

    Ranks hold equally many rows; those beyond the vocabulary are zero and never looked up.
    """

    turned: Tensor | None = None
    packed: Product | None = None

    def __init__(self, build: Build, vocab: int, width: int) -> None:
        super().__init__()
        self.shards, self.shape = build.shards, (vocab, width)
        self.rows = -(-vocab // build.shards.size)
        self.weight = build.parameter(self.rows, width)

    def forward(self, tokens_T: Tensor) -> Tensor:
        if self.shards.size == 1:
            return F.embedding(tokens_T, self.weight)
        local_T = tokens_T - self.rows * self.shards.rank
        mine_T = (local_T >= 0) & (local_T < self.rows)
        x_TD = F.embedding(local_T.where(mine_T, 0), self.weight) * mine_T[:, None]
        return self.shards.reduce(x_TD)

    def logits(self, x_TD: Tensor) -> Tensor:
        scores_TV = linear(self.shards.enter(x_TD), self.weight, self.turned, self.packed)
        return self.shards.gather(scores_TV)[..., : self.shape[0]]

    def slots(self) -> Iterator[Slot]:
        first = min(self.rows * self.shards.rank, self.shape[0])
        last = min(first + self.rows, self.shape[0])
        whole = self.shards.size == 1
        yield Slot("weight", "weight", self.shape, () if whole else (slice(0, last - first),),
                   None if whole else (0, first, last))  # fmt: skip


class Norm(Holder):
    """RMSNorm or LayerNorm, in float32; Gemma's weights are offsets from one."""

    def __init__(self, build: Build, spec: ModelSpec, width: int, shards: Shards = ALONE) -> None:
        super().__init__()
        self.eps, self.plus_one, self.shards = spec.norm_eps, spec.norm_plus_one, shards
        self.weight = build.parameter(width)
        self.bias = build.parameter(width) if spec.norm == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        # A norm of sharded heads is itself whole on every rank, but sees only some of the heads:
        # `whole` sums its gradient over the ranks.
        weight = self.shards.whole(self.weight)
        if self.bias is not None:
            return F.layer_norm(x, weight.shape, weight, self.shards.whole(self.bias), self.eps)
        if x.dtype == torch.float32 and not x.is_cuda and not self.plus_one:
            return F.rms_norm(
                x, weight.shape, weight, self.eps
            )  # what stands below, in fewer calls
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.plus_one:
            return (wide * (1.0 + weight.float())).to(x.dtype)
        return weight * wide.to(x.dtype)

    def slots(self) -> Iterator[Slot]:
        shape = tuple(self.weight.shape)
        yield Slot("weight", "weight", shape, init="zeros" if self.plus_one else "ones")
        if self.bias is not None:
            yield Slot("bias", "bias", shape, init="zeros")


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) where there is no gate."""

    def __init__(self, build: Build, spec: ModelSpec, intermediate: int) -> None:
        super().__init__()
        names = ("gate", "up") if spec.gated else ("up",)
        self.act = ACTIVATIONS[spec.activation]
        self.inner = Columns(build, spec.hidden, dict.fromkeys(names, intermediate), spec.mlp_bias)
        self.down = Rows(build, intermediate, spec.hidden, spec.mlp_bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        first_TF, *rest = self.inner(x_TD)
        inner_TF = self.act(first_TF)
        return self.down(inner_TF * rest[0] if rest else inner_TF)


class Attention(nn.Module):
    """Grouped-query attention; where the keys live is the business of `attend`."""

    def __init__(self, build: Build, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        even_share(spec.kv_heads, build.shards, "key/value heads")
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        parts = {"q": queries, "k": keys, "v": keys}
        self.head_dim = spec.head_dim
        self.qkv = Columns(build, spec.hidden, parts, spec.qkv_bias)
        self.q_norm = Norm(build, spec, spec.head_dim, build.shards) if spec.qk_norm else None
        self.k_norm = Norm(build, spec, spec.head_dim, build.shards) if spec.qk_norm else None
        self.out = Rows(build, queries, spec.hidden, spec.out_bias)
        self.rule = Rule(layer, spec.scale, spec.window(layer), spec.attention_softcap)

    def forward(self, x_TD: Tensor, rotate: Rotation | None, attend: Attend) -> Tensor:
        q_THC, k_TKC, v_TKC = (y.unflatten(-1, (-1, self.head_dim)) for y in self.qkv(x_TD))
        if self.q_norm is not None and self.k_norm is not None:
            q_THC, k_TKC = self.q_norm(q_THC), self.k_norm(k_TKC)
        if rotate is not None:
            q_THC, k_TKC = rotate(q_THC), rotate(k_TKC)
        return self.out(attend(q_THC, k_TKC, v_TKC, self.rule).flatten(-2))
