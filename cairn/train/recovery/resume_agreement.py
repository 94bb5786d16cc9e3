"""Ranks that were started one by one agree on the step to resume from. Each says what its node has; all decide alike.

    rank 0 (node a) --.                                  holdings of a and b, and what the disk has
    rank 1 (node a) ---+-- all-gather of Present --> decide (pure): Agreement, the same on every rank
    rank 2 (node b) --'                                  keepers of the copies to come, what is forgotten

Every node is number 0 for its own ranks: that is how `Reach` and the board name it. No sockets, no clock.
"""

from collections.abc import Sequence

import msgspec

from cairn.core.errors import ConfigError
from cairn.core.shared_secret import VARIABLE, Secret
from cairn.train.checkpoint.peer_messages import HeldCopy
from cairn.train.checkpoint.peer_placement import keepers, newest_point
from cairn.train.checkpoint.peer_restore import Recall


class Arrived(msgspec.Struct, frozen=True):
    """First message of a rank. Secrets are exchanged between ranks only, like gradients."""

    host: str
    known: (
        Secret | None
    )  # of the environment, or of a memory on its node that has outlived its ranks
    fresh: Secret  # that of rank 0 counts, where none is known


class Present(msgspec.Struct, frozen=True):
    """Message of a rank when all have arrived."""

    address: str  # of its node's memory
    host: str
    began: float  # when that memory began, by the wall clock
    holdings: tuple[HeldCopy, ...]  # of the node; said by its first rank
    disk: int  # the newest step on disk; rank 0 says it for all
    watch: str = ""  # address of its node's watch
    life: int = 0  # a number of its own; that of rank 0 counts


class Agreement(msgspec.Struct, frozen=True):
    """Agreement on the checkpoint to resume from, and on the placement of copies."""

    addresses: tuple[str, ...]  # of all nodes, this rank's first
    keeper: str  # of this node's copies; empty: none
    recall: Recall | None  # None: from disk, or from nothing
    generation: int
    back_to: int
    before: int  # how many ranks the life before had; 0: there was none that left copies
    youngest: float  # when the newest node's memory began, by the wall clock
    leads: bool  # whether this rank speaks to its node's memory for all of its node
    watch: str = ""  # of the node that watches all: rank 0's
    life: int = 0  # of this start of the ranks


def secret_of(arrived: Sequence[Arrived]) -> Secret:
    """Shared secret of the memory agents, so that copies are given to this job only."""
    with_secret = [one for one in arrived if one.known is not None]
    for one in with_secret:
        if one.known != with_secret[0].known:
            raise ConfigError(
                f"the hosts {with_secret[0].host} and {one.host} have different secrets for one job",
                hint=f"set the same {VARIABLE} on every node, or none",
            )
    return next((one.known for one in with_secret if one.known is not None), arrived[0].fresh)


def decide(present: Sequence[Present], rank: int) -> Agreement:
    nodes = list(dict.fromkeys(one.address for one in present))
    mine = present[rank].address
    addresses = (mine, *(address for address in nodes if address != mine))
    copies_by_node = {
        addresses.index(one.address): one.holdings for one in present if one.holdings
    }  # the first rank of each node has said it
    newest = newest_point(copies_by_node)
    disk = present[0].disk
    recall, before = newest if newest is not None else (None, 0)
    if recall is not None and recall.step < disk:
        recall = None
    newest_generation = max(
        (h.generation for copies in copies_by_node.values() for h in copies), default=0
    )
    same = recall is not None and before == len(present)
    return Agreement(
        addresses=addresses,
        keeper=_keeper(present, nodes, mine),
        recall=recall,
        generation=recall.generation if recall is not None and same else newest_generation + 1,
        back_to=recall.step if recall is not None else disk,
        before=before,
        youngest=max(one.began for one in present),
        leads=min(n for n, one in enumerate(present) if one.address == mine) == rank,
        watch=present[0].watch,
        life=present[0].life,
    )


def _keeper(present: Sequence[Present], nodes: list[str], mine: str) -> str:
    """Another node, on another machine where there is one."""
    hosts = list(dict.fromkeys(one.host for one in present))
    host_of = {one.address: hosts.index(one.host) for one in present}
    several = len(hosts) > 1
    domains = [host_of[address] if several else n for n, address in enumerate(nodes)]
    keeper = keepers(domains)[nodes.index(mine)]
    return "" if keeper is None else nodes[keeper]
