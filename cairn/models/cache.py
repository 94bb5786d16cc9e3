"""Cache layout of a model: the data kept for each token or sequence, and for how long.

    Plane        one array of a layer's cache: for each token so many heads of so many columns (keys, values, a latent)
    CacheGroup   layers that keep the same planes for equally long; one page table serves all of them

    full     every token is kept
    window   a token is read for the last time `window` - 1 tokens later
    state    one state of fixed size, whatever the length; an earlier one is known only where a snapshot was taken

States lie in slots of their own, as a state is as large as the keys of hundreds of tokens. Of the other groups, a page
holds `page_size` tokens of one group's layers. The layers of one kind are split into groups of equal size, so that
every page has the same bytes and one pool serves all groups: memory that windows do not need is free for long
contexts, and short requests may use all of it. Torch-free arithmetic; who holds which page is for the block manager.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from cairn.models.mixer import Plane
from cairn.models.spec import ModelSpec

Kind = Literal["full", "window", "state"]
MOST_GROUPS = 8  # every group has a page table, which each step reads
LONG = 16  # windows in a long context


class CacheGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that share a page table."""

    kind: Kind = "full"
    window: int = 0  # tokens that a layer sees, the newest included; 0 unless the kind is window
    layers: tuple[int, ...] = ()
    planes: tuple[Plane, ...] = ()  # of each layer

    def first_page(self, computed: int, page_size: int) -> int:
        """The first page that is read when token `computed` comes next; everything before it can be freed."""
        if self.kind != "window":
            return 0
        return max(0, computed - self.window + 1) // page_size

    def pages_of(self, tokens: int, page_size: int) -> int:
        """Pages that one request holds when so many tokens are known and the last one is computed next."""
        if self.kind == "state":
            return 0
        return -(-tokens // page_size) - self.first_page(tokens - 1, page_size)

    def most_pages(self, tokens: int, page_size: int, span: int = 0) -> int:
        """Pages that one request of so many tokens may need at once, on its way there or at its end.

        `span`: the most tokens of it that have to be computed in one step, all of which lie in pages then.
        """
        if self.kind == "state":
            return 0
        pages = -(-tokens // page_size)
        if not self.window:
            return pages
        return min(pages, -(-(self.window - 1) // page_size) + 1 + -(-span // page_size))


ONE_GROUP = (CacheGroup(),)  # every layer keeps every token


def layer_planes(spec: ModelSpec, layer: int, shards: int = 1) -> tuple[Plane, ...]:
    """Cache planes of a layer on one tensor-parallel rank."""
    return spec.mixer_shape(layer).planes(spec, shards)


def cache_groups(
    spec: ModelSpec, shards: int = 1, *, grouped: bool = True
) -> tuple[CacheGroup, ...]:
    """The groups of a model, full attention first, states last.

    `grouped=False`: one that keeps every token of every layer that keeps tokens.
    """
    kinds: dict[int, list[int]] = {}
    for layer in spec.token_layers:
        kinds.setdefault(spec.window(layer) if grouped else 0, []).append(layer)
    size = _group_layers({window: len(layers) for window, layers in kinds.items()})
    groups = []
    for window, layers in sorted(kinds.items()):
        planes = layer_planes(spec, layers[0], shards)
        kind: Kind = "window" if window else "full"
        for first in range(0, len(layers), size):
            groups.append(CacheGroup(kind, window, tuple(layers[first : first + size]), planes))
    return (*groups, *_state_groups(spec, shards))


def _state_groups(spec: ModelSpec, shards: int) -> list[CacheGroup]:
    """Cache groups of recurrent mixers; a slot contains the states of all layers of the group."""
    layers: dict[str, list[int]] = {}
    for layer in range(spec.layers):
        if spec.keeps_state(layer):
            layers.setdefault(spec.mixer_of(layer), []).append(layer)
    return [
        CacheGroup("state", 0, tuple(layers_alike), layer_planes(spec, layers_alike[0], shards))
        for layers_alike in layers.values()
    ]


def with_draft_layer(groups: Sequence[CacheGroup], layer: int) -> tuple[CacheGroup, ...]:
    """Append the layer of a draft head to the group of layers; all of them keep every token."""
    (group,) = paged(groups)
    return (msgspec.structs.replace(group, layers=(*group.layers, layer)),)


def cache_bytes_per_token(spec: ModelSpec, value_bytes: float = 2, shards: int = 1) -> float:
    """Bytes that all layers with a token cache write per token."""
    return sum(
        plane.token_bytes(value_bytes)
        for layer in spec.token_layers
        for plane in layer_planes(spec, layer, shards)
    )


def cache_bytes(spec: ModelSpec, tokens: int, value_bytes: float = 2, shards: int = 1) -> float:
    """Cache bytes of a sequence: its state, and at most the window of a sliding-window layer."""
    kept = state_bytes(cache_groups(spec, shards), value_bytes)
    for layer in spec.token_layers:
        planes = layer_planes(spec, layer, shards)
        of_token = sum(plane.token_bytes(value_bytes) for plane in planes)
        kept += min(tokens, spec.window(layer) or tokens) * of_token
    return kept


def page_layers(groups: Sequence[CacheGroup]) -> int:
    """Layers that a page has room for: as many as the largest group has."""
    return max(len(group.layers) for group in paged(groups))


def paged(groups: Sequence[CacheGroup]) -> list[CacheGroup]:
    """The groups with block tables."""
    return [group for group in groups if group.kind != "state"]


def state_bytes(groups: Sequence[CacheGroup], value_bytes: float) -> float:
    """Bytes of one sequence's state, in all groups that have one; 0: no layer keeps a state."""
    return sum(
        len(group.layers) * plane.token_bytes(value_bytes)
        for group in groups
        if group.kind == "state"
        for plane in group.planes
    )


def page_bytes(groups: Sequence[CacheGroup], page_size: int, value_bytes: float) -> int:
    """Bytes of a page, which is the same for every group."""
    of_token = max(sum(p.token_bytes(value_bytes) for p in group.planes) for group in paged(groups))
    return int(page_size * page_layers(groups) * of_token)


def pages_of(groups: Sequence[CacheGroup], tokens: int, page_size: int) -> int:
    """Pages that one request of so many tokens holds in all groups together."""
    return sum(group.pages_of(tokens, page_size) for group in groups)


def most_pages(groups: Sequence[CacheGroup], tokens: int, page_size: int, span: int = 0) -> int:
    """Pages that one request of so many tokens may need at once, in all groups together; `span` as of a group."""
    return sum(group.most_pages(tokens, page_size, span) for group in groups)


def _group_layers(counts: dict[int, int]) -> int:
    """Layers of a group, such that the places left empty cost least in short and in long contexts."""
    if len(counts) == 1:
        return next(iter(counts.values()))
    largest = max(counts)
    lengths = (1, LONG * largest)

    def overhead(size: int) -> float:
        ratios = []
        for length in lengths:
            kept = {window: min(length, window or length) for window in counts}
            needed = sum(kept[window] * count for window, count in counts.items())
            taken = sum(kept[window] * size * -(-count // size) for window, count in counts.items())
            ratios.append(taken / needed)
        return max(ratios)

    sizes = range(1, max(counts.values()) + 1)
    few = [size for size in sizes if sum(-(-n // size) for n in counts.values()) <= MOST_GROUPS]
    return min(few or [max(counts.values())], key=lambda size: (overhead(size), -size))
