"""Memory of an engine's blocks for transfers.

    on a CPU      the pool itself moves into memory that the transport reaches; nothing is copied on this side
    staged        pages are copied into host memory and read from there, or arrive there and are copied home:
                  for a GPU's pool, which graphs know by its address

One rank only: a tensor-parallel engine would have one of these for each.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.comm.transfer.kv import REGION, KVContents, KVLayout
from cairn.comm.transfer.transport import Transport
from cairn.core.errors import ConfigError, RequestError
from cairn.models.linear.form import HasRows
from cairn.models.transformer import Transformer
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.pages import PagePool
from cairn.serve.engine.runner import Runner

STAGED_PAGES = 512  # as many as the pool has, if that is less


class KVMemory:
    """An engine's pages in reach of `transport`, which must not listen yet."""

    def __init__(
        self,
        engine: Engine,
        transport: Transport,
        staged: bool | None = None,
        staged_pages: int = STAGED_PAGES,
    ) -> None:
        runner = engine.runner
        self._pool = pool = runner.pool
        self._staged = pool.cache.is_cuda if staged is None else staged
        if pool.cache.is_cuda and not self._staged:
            raise ConfigError("the pages of a GPU are staged", hint="leave out staged=False")
        pages = min(staged_pages, pool.pages) if self._staged else pool.pages
        self.layout = layout_of(runner, pages)
        memory = torch.from_numpy(transport.allocate(REGION, self.layout.region_bytes(0)))
        shape = (*pool.cache.shape[:2], pages, *pool.cache.shape[3:])
        cache = memory.view(pool.cache.dtype).view(shape)
        self._stage: Tensor | None = None
        if self._staged:
            self._stage, self._free = cache, list(range(pages))
        else:
            pool.move(cache)
            runner.pages_moved()

    def entries_of(self, tokens: int) -> int:
        """Entries of the cache that a prompt of so many tokens hands over; whole pages where there are several groups.

        A transfer sees one sequence: the pages of the first group, then those of the next, all of the same shape.
        """
        groups, size = self._pool.groups, self._pool.page_size
        if not any(group.window for group in groups):
            return tokens
        pages = sum(-(-tokens // size) - group.first_page(tokens, size) for group in groups)
        return pages * size

    def check_room(self, tokens: int) -> None:
        """A RequestError: a prompt of so many tokens could never be offered."""
        pages = -(-self.entries_of(tokens) // self._pool.page_size)
        if pages > self.layout.pages:
            raise RequestError(
                f"a prompt of {tokens} tokens has {pages} pages, and {self.layout.pages} can be on offer",
                hint="compute it where it is decoded",
            )

    def bytes_of(self, tokens: int, start: int = 0) -> int:
        """Bytes of a hand-over of `tokens` tokens without the first `start`."""
        contents = self.layout.contents
        columns = contents.layers * contents.planes * contents.kv_heads * contents.width
        return (self.entries_of(tokens) - start) * columns * contents.itemsize

    def place(self, pages: Sequence[int]) -> list[int] | None:
        """Transfer locations of these blocks; None if the staging area is full."""
        if self._stage is None:
            return list(pages)
        if len(self._free) < len(pages):
            return None
        return [self._free.pop() for _ in pages]

    def take_back(self, table: Sequence[int]) -> None:
        if self._stage is not None:
            self._free += table

    def copy_out(self, pages: Sequence[int], table: Sequence[int]) -> None:
        """Copy blocks to the staging area, after all work launched on the device so far."""
        if self._stage is not None:
            self._stage[:, :, list(table)] = self._pool.cache[:, :, list(pages)].cpu()

    def copy_home(self, table: Sequence[int], pages: Sequence[int]) -> None:
        """Copy received blocks from the staging area."""
        if self._stage is not None:
            cache = self._pool.cache
            cache[:, :, list(pages)] = self._stage[:, :, list(table)].to(cache.device)


def layout_of(runner: Runner, pages: int) -> KVLayout:
    pool = runner.pool
    keys = pool.groups[0].planes[0]
    shards = runner.model.build.shards.size
    if shards != 1:
        raise ConfigError(
            f"a hand-over between engines of {shards} ranks",
            hint="tensor parallel 1 on both sides; the planner below knows more",
        )
    if pool.scales is not None and pool.scales.are_measured:
        raise ConfigError(
            "a hand-over of a float8 cache whose scales each engine measures for itself",
            hint="leave out --kv-cache-dtype, or serve a checkpoint that has the scales of its cache",
        )
    contents = KVContents(
        model=identity(runner.model) + _grouping(pool),
        layers=pool.cache.shape[0],
        kv_heads=keys.heads,
        width=pool.cache.shape[-1],
        latent=pool.cache.shape[1] == 1,
        dtype=str(pool.cache.dtype).removeprefix("torch."),
    )
    return KVLayout(
        contents=contents, page_size=pool.page_size, pages=pages, heads_first=pool.heads_first
    )


def identity(model: Transformer) -> str:
    """The same for engines of the same weights: its shape, and a few rows of it."""
    form = model.embedding.form
    kept = form.rows(torch.arange(16)) if isinstance(form, HasRows) else model.embedding.weight[:16]
    values = kept.detach().float().cpu().numpy().tobytes()
    digest = hashlib.sha256(repr(model.spec).encode() + values).hexdigest()[:16]
    return f"{model.spec.layers} x {model.spec.hidden} {digest}"


def _grouping(pool: PagePool) -> str:
    """Description of the cache groups, which must be equal on both sides."""
    if not any(group.window for group in pool.groups):
        return ""
    windows = ", ".join(f"{len(group.layers)} x {group.window}" for group in pool.groups)
    return f" in pages of {pool.page_size}, groups {windows}"
