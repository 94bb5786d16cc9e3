"""A KV cache as shards: how any engine's pages lie in memory, whatever its parallelism and page size.

    the whole   [layer, key or value, token, head, column]       what every layout holds a part of
    a rank      layers of its pipeline stage, heads of its tensor parallel share, tokens in its pages
    its memory  [layer, plane, page, inside a page]              or [page, layer, plane, inside a page]
    inside      [token, head, column], or [head, token, column] on a GPU

More ranks than heads: each head has tp / heads holders. A latent cache (MLA) has one plane and one head, and every rank
of a stage holds all of it. What the two sides must agree on is in `KVContents`; everything else a plan makes good.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from cairn.comm.transfer.cast import check_kinds
from cairn.comm.transfer.errors import TransferError
from cairn.comm.transfer.plan import TransferPlan, make_plan
from cairn.comm.transfer.shard import Axis, TensorShard, even_axis
from cairn.core.errors import ConfigError

ITEMSIZES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
}
REGION = "kv"


class KVContents(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of a cache. They must be equal on both sides, or a hand-over is refused."""

    model: str  # its name or, better, the fingerprint of its weights
    layers: int
    kv_heads: int  # 1 for a latent cache
    width: int  # columns: of a head, or of the latent with its rotary part
    latent: bool = False  # MLA: one plane, held whole by every tensor parallel rank
    dtype: str = "bfloat16"

    @property
    def planes(self) -> int:
        return 1 if self.latent else 2

    @property
    def itemsize(self) -> int:
        return ITEMSIZES[self.dtype]

    def words(self) -> str:
        heads = "latent" if self.latent else f"{self.kv_heads} heads"
        return f"{self.model}, {self.layers} layers, {heads} x {self.width}, {self.dtype}"


class KVLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Layout of the contents in one engine."""

    contents: KVContents
    page_size: int  # tokens
    pages: int  # of each rank
    tp: int = 1
    pp: int = 1
    heads_first: bool = False  # inside a page: [head, token, column], not [token, head, column]
    page_outermost: bool = False  # all layers of a page together, rather than all pages of a layer
    page_gap_bytes: int = 0  # unused bytes behind each page, for alignment

    def __post_init__(self) -> None:
        _check(self)

    @property
    def ranks(self) -> int:
        """Rank r is tensor parallel rank r % tp of pipeline stage r // tp."""
        return self.tp * self.pp

    @property
    def heads_per_rank(self) -> int:
        return max(1, self.contents.kv_heads // self.tp) if not self.contents.latent else 1

    def heads(self, rank: int) -> tuple[int, int]:
        """The heads of a rank as (first, end)."""
        if self.contents.latent:
            return 0, 1
        first = rank % self.tp * self.contents.kv_heads // self.tp
        return first, first + self.heads_per_rank

    def layers(self, rank: int) -> tuple[int, int]:
        stage, layers = rank // self.tp, self.contents.layers
        return stage * layers // self.pp, (stage + 1) * layers // self.pp

    @property
    def plane_bytes(self) -> int:
        """Keys, or values, of one layer in one page of one rank, with the gap."""
        inside = self.page_size * self.heads_per_rank * self.contents.width
        return inside * self.contents.itemsize + self.page_gap_bytes

    def region_bytes(self, rank: int) -> int:
        first, last = self.layers(rank)
        return (last - first) * self.contents.planes * self.pages * self.plane_bytes

    def words(self) -> str:
        inside = "heads first" if self.heads_first else "tokens first"
        outside = ", page outermost" if self.page_outermost else ""
        return f"tp {self.tp}, pp {self.pp}, pages of {self.page_size}, {inside}{outside}"


def kv_shards(
    layout: KVLayout,
    table: Sequence[int],
    tokens: tuple[int, int],
    layers: tuple[int, int] | None = None,
    tensor: str = REGION,
) -> list[TensorShard]:
    """Shards of one sequence by rank. `table` is its block table.

    `tokens` and `layers`, first and behind the last, choose a part of it.
    """
    _check_table(layout, table, tokens)
    wanted = layers or (0, layout.contents.layers)
    shards = (_shard(layout, rank, table, tokens, wanted, tensor) for rank in range(layout.ranks))
    return [shard for shard in shards if shard.elements]


def plan_kv(
    source: KVLayout,
    source_table: Sequence[int],
    target: KVLayout,
    target_table: Sequence[int],
    tokens: tuple[int, int],
    layers: tuple[int, int] | None = None,
    cast: bool = False,
) -> TransferPlan:
    """The bytes of one sequence, from one engine's pages into another's.

    `tokens` beginning later than 0 leaves out a prefix that the target has already; the tables are of the whole
    sequence. `cast`: the dtypes may differ, and each leg goes through `cast.landed` and `cast.convert`.
    """
    check_contents(source, target, cast)
    return make_plan(
        kv_shards(source, source_table, tokens, layers),
        kv_shards(target, target_table, tokens, layers),
    )


def check_contents(source: KVLayout, target: KVLayout, cast: bool = False) -> None:
    theirs, ours = source.contents, target.contents
    differing = [
        name for name in ours.__struct_fields__ if getattr(ours, name) != getattr(theirs, name)
    ]
    if cast and differing == ["dtype"]:
        check_kinds(theirs.dtype, ours.dtype)
        return
    if differing:
        both = [f"{name} {getattr(theirs, name)!r} / {getattr(ours, name)!r}" for name in differing]
        hint = "serve the same model with the same KV dtype on both sides"
        if differing == ["dtype"]:
            hint = "give both sides one KV dtype, or plan with cast=True"
        raise TransferError(f"the caches differ (source / target): {', '.join(both)}", hint=hint)


def _shard(
    layout: KVLayout,
    rank: int,
    table: Sequence[int],
    tokens: tuple[int, int],
    layers: tuple[int, int],
    tensor: str,
) -> TensorShard:
    contents, own, heads = layout.contents, layout.layers(rank), layout.heads(rank)
    plane_bytes, item = layout.plane_bytes, contents.itemsize
    token, head = contents.width * layout.heads_per_rank, contents.width
    if layout.heads_first:
        token, head = contents.width, contents.width * layout.page_size
    if layout.page_outermost:
        plane = plane_bytes
        layer, page = plane * contents.planes, plane * contents.planes * (own[1] - own[0])
    else:
        page, plane = plane_bytes, plane_bytes * layout.pages
        layer = plane * contents.planes
    first, last = max(own[0], layers[0]), min(own[1], layers[1])
    place = np.arange(*tokens, dtype=np.int64)
    pages = np.asarray(table, dtype=np.int64)[place // layout.page_size]
    axes = (
        even_axis(first, max(first, last), layer),
        even_axis(0, contents.planes, plane),
        Axis(tokens[0], pages * page + place % layout.page_size * token * item),
        even_axis(*heads, head * item),
        even_axis(0, contents.width, item),
    )
    return TensorShard(tensor, rank, REGION, (first - own[0]) * layer, item, axes)


def _check(layout: KVLayout) -> None:
    contents = layout.contents
    if contents.dtype not in ITEMSIZES:
        raise ConfigError(
            f"KV dtype {contents.dtype!r} is unknown", hint=f"one of {', '.join(ITEMSIZES)}"
        )
    sizes = {name: getattr(layout, name) for name in ("page_size", "pages", "tp", "pp")}
    sizes |= {name: getattr(contents, name) for name in ("layers", "kv_heads", "width")}
    wrong = [f"{name} is {size}" for name, size in sizes.items() if size < 1]
    if wrong or layout.page_gap_bytes < 0:
        raise ConfigError(f"a KV layout needs sizes of at least 1: {', '.join(wrong)}")
    if contents.latent and contents.kv_heads != 1:
        raise ConfigError(f"a latent cache has one head, not {contents.kv_heads}")
    heads, tp = contents.kv_heads, layout.tp
    if not contents.latent and heads % tp and tp % heads:
        raise ConfigError(
            f"tensor parallel {tp} neither divides {heads} KV heads nor is a multiple of them",
            hint="heads are cut evenly, or repeated evenly",
        )
    if layout.pp > contents.layers:
        raise ConfigError(f"{layout.pp} pipeline stages for {contents.layers} layers")


def _check_table(layout: KVLayout, table: Sequence[int], tokens: tuple[int, int]) -> None:
    start, stop = tokens
    needed = -(-stop // layout.page_size)
    if not 0 <= start <= stop or needed > len(table):
        raise TransferError(
            f"tokens {start}..{stop} in {len(table)} pages of {layout.page_size}",
            hint=f"the table has to name {max(0, needed)} pages",
        )
    used = list(table[start // layout.page_size : needed])
    outside = [page for page in used if not 0 <= page < layout.pages]
    if outside:
        raise TransferError(
            f"page {outside[0]} is not one of the {layout.pages} of this cache",
            hint="page tables are per engine: was this one made for the other side?",
        )
