"""Free GPUs and gang placement: nodes grouped by equal state, each group as a bit set.

    state (8,)        bits of the nodes with all 8 GPUs idle
    state (5,)        ... 5 idle
    state (3, 350)    ... 3 idle, and one shared GPU with 350/1000 left

A search looks at each state once, however many nodes there are: a policy scores states (`Rule`), not nodes, and the
lowest bit of the best group is the node. A gang gets all of its pieces or None. Knows no jobs and no time.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache

from cairn.cluster.simulate.jobs import MILLI, Piece, Pieces, SimulatedCluster

State = tuple[int, ...]  # idle GPUs, then what shared ones have left, ascending
Rule = Callable[[State, int, int], float]  # state, GPUs, milli -> cost; the least is taken
NEVER = float("inf")


def tightest(state: State, gpus: int, milli: int) -> float:
    """Best fit: the fewest idle GPUs after it, and a shared GPU before an idle one."""
    if milli < MILLI:
        left = [share for share in state[1:] if share >= milli]
        return min(left) - milli - MILLI if left else state[0] * MILLI
    return state[0] * MILLI + sum(state[1:])


class PlacementCosts(dict[State, float]):
    """Cost of placing a job on a node in each state, cached; NEVER if it does not fit."""

    def __init__(self, rule: Rule, gpus: int, milli: int) -> None:
        super().__init__()
        self._rule, self._gpus, self._milli = rule, gpus, milli

    def __missing__(self, state: State) -> float:
        shares = self._milli < MILLI and len(state) > 1 and state[-1] >= self._milli
        fits = shares or state[0] >= self._gpus
        cost = self[state] = self._rule(state, self._gpus, self._milli) if fits else NEVER
        return cost


class Free:
    def __init__(self, cluster: SimulatedCluster) -> None:
        self.gpus = cluster.gpus
        self.idle = cluster.total  # GPUs that no job uses, not even in part
        self.sharing = 0  # GPUs that are used in part
        self._all = (1 << cluster.gpus) - 1
        self.masks = [self._all] * cluster.nodes  # of idle GPUs
        self.shared: list[dict[int, int]] = [{} for _ in range(cluster.nodes)]  # GPU -> left
        self._nodes_with = [0] * cluster.gpus + [cluster.nodes]  # by idle GPUs
        self.state: list[State] = [(cluster.gpus,)] * cluster.nodes
        self.groups: dict[State, int] = {(cluster.gpus,): (1 << cluster.nodes) - 1}
        self.racks = [
            ((1 << min(cluster.rack, cluster.nodes - begin)) - 1) << begin
            for begin in range(0, cluster.nodes, cluster.rack)
        ]
        self._rack = cluster.rack
        self._too_many: int | None = None  # forgotten whenever a node changes
        self._costs: dict[tuple[Rule, int, int], PlacementCosts] = {}

    def find(
        self, gpus: int, milli: int, rule: Rule, *, avoid: int = 0, packed: bool = False
    ) -> Pieces | None:
        """All pieces of a gang, or None. `avoid` are nodes not to use; `packed` keeps it in few racks."""
        if gpus > self.gpus:
            return self._gang(*divmod(gpus, self.gpus), rule, avoid, packed)
        node = self._node(gpus, milli, rule, avoid, packed)
        if node is None:
            return None
        if milli < MILLI:
            return (self._shared_piece(node, milli),)
        return ((node, _lowest_gpus(self.masks[node], gpus), MILLI),)

    def _node(self, gpus: int, milli: int, rule: Rule, avoid: int, packed: bool) -> int | None:
        """The node of the best state; of equally good states the lowest node."""
        costs = self._costs.get((rule, gpus, milli))
        if costs is None:
            costs = self._costs[rule, gpus, milli] = PlacementCosts(rule, gpus, milli)
        best, least, idle = 0, NEVER, gpus if milli == MILLI else 0
        for state, nodes in self.groups.items():
            if state[0] < idle:
                continue
            cost = costs[state]
            if cost > least or cost == NEVER:
                continue
            if avoid:
                nodes &= ~avoid
                if not nodes:
                    continue
            if cost < least or nodes & -nodes < best & -best:
                best, least = nodes, cost
        if not best:
            return None
        if packed and len(self.racks) > 1:
            best = self._rack_in_use(best)
        return (best & -best).bit_length() - 1

    def _rack_in_use(self, nodes: int) -> int:
        """The nodes whose rack has the fewest idle nodes, so that whole racks stay free for gangs."""
        idle = self.groups.get((self.gpus,), 0)
        return min(
            (nodes & rack for rack in self.racks if nodes & rack),
            key=lambda part: (idle & self.racks[_lowest(part) // self._rack]).bit_count(),
        )

    def _gang(self, whole: int, rest: int, rule: Rule, avoid: int, packed: bool) -> Pieces | None:
        idle = self.groups.get((self.gpus,), 0) & ~avoid
        if idle.bit_count() < whole:
            return None
        chosen = self._few_racks(idle, whole) if packed else lowest_bits(idle, whole)
        pieces = [(node, self._all, MILLI) for node in _bits(chosen)]
        if rest:
            node = self._node(rest, MILLI, rule, avoid | chosen, packed)
            if node is None:
                return None
            pieces.append((node, _lowest_gpus(self.masks[node], rest), MILLI))
        return tuple(pieces)

    def _few_racks(self, idle: int, count: int) -> int:
        """The tightest rack that has enough; otherwise the fullest racks until there are enough."""
        parts = [part for rack in self.racks if (part := idle & rack)]
        enough = [part for part in parts if part.bit_count() >= count]
        if enough:
            return lowest_bits(min(enough, key=int.bit_count), count)
        chosen = 0
        for part in sorted(parts, key=int.bit_count, reverse=True):
            count_here = min(part.bit_count(), count - chosen.bit_count())
            chosen |= lowest_bits(part, count_here)
        return chosen

    def _shared_piece(self, node: int, milli: int) -> Piece:
        """The tightest GPU that is shared already, otherwise an idle one."""
        left = [(share, gpu) for gpu, share in self.shared[node].items() if share >= milli]
        if left:
            return node, 1 << min(left)[1], milli
        return node, _lowest_gpus(self.masks[node], 1), milli

    def take(self, pieces: Pieces) -> None:
        masks = self.masks
        for node, mask, milli in pieces:
            idle = masks[node] & mask
            if milli < MILLI:
                self._take_share(node, mask, milli, bool(idle))
            elif idle != mask:
                raise RuntimeError(f"node {node}: GPUs {mask:b} are not all idle ({idle:b})")
            if idle:
                masks[node] ^= idle
                self.idle -= idle.bit_count()
            self._changed(node)

    def _take_share(self, node: int, mask: int, milli: int, idle: bool) -> None:
        gpu, shared = mask.bit_length() - 1, self.shared[node]
        left = MILLI if idle else shared.get(gpu, 0)
        if left < milli:
            raise RuntimeError(f"node {node} GPU {gpu}: {left}/1000 left, {milli} wanted")
        shared[gpu] = left - milli
        self.sharing += idle

    def give(self, pieces: Pieces) -> None:
        masks = self.masks
        for node, mask, milli in pieces:
            freed = mask if milli == MILLI else self._give_share(node, mask, milli)
            if masks[node] & freed:
                raise RuntimeError(f"node {node}: GPUs {freed:b} are given back twice")
            if freed:
                masks[node] |= freed
                self.idle += freed.bit_count()
            self._changed(node)

    def _give_share(self, node: int, mask: int, milli: int) -> int:
        """The GPU if no job shares it any more, otherwise 0."""
        gpu, shared = mask.bit_length() - 1, self.shared[node]
        shared[gpu] += milli
        if shared[gpu] < MILLI:
            return 0
        del shared[gpu]
        self.sharing -= 1
        return mask

    def _changed(self, node: int) -> None:
        shared, idle = self.shared[node], self.masks[node].bit_count()
        old, groups, bit = self.state[node], self.groups, 1 << node
        new = (idle, *sorted(shared.values())) if shared else (idle,)
        if new == old:
            return
        rest = groups[old] ^ bit
        if rest:
            groups[old] = rest
        else:
            del groups[old]
        groups[new] = groups.get(new, 0) | bit
        self._nodes_with[old[0]] -= 1
        self._nodes_with[idle] += 1
        self.state[node] = new
        self._too_many = None

    def racks_of(self, pieces: Pieces) -> int:
        return len({node // self._rack for node, _, _ in pieces})

    def largest(self) -> int:
        """Most idle GPUs of one node."""
        return next(idle for idle in range(self.gpus, -1, -1) if self._nodes_with[idle])

    def too_many(self) -> int:
        """So many whole GPUs, or more, do not fit, wherever they would go."""
        if self._too_many is None:
            nodes = self._nodes_with[-1]
            most = min(self.idle, (nodes + 1) * self.gpus - 1) if nodes else self.largest()
            self._too_many = most + 1
        return self._too_many

    def too_many_off(self, avoid: int) -> int:
        """The same on all nodes but these."""
        nodes = (self.groups.get((self.gpus,), 0) & ~avoid).bit_count()
        if nodes:
            return (nodes + 1) * self.gpus
        most = 0
        for state, group in self.groups.items():
            if state[0] > most and group & ~avoid:
                most = state[0]
        return most + 1

    def idle_nodes(self) -> int:
        return self._nodes_with[-1]


def lowest_bits(bits: int, count: int) -> int:
    chosen = 0
    for _ in range(count):
        bit = bits & -bits
        chosen |= bit
        bits ^= bit
    return chosen


_lowest_gpus = lru_cache(maxsize=1 << 14)(
    lowest_bits
)  # of one node: few masks, asked for all the time


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _bits(bits: int) -> Iterator[int]:
    while bits:
        bit = bits & -bits
        yield bit.bit_length() - 1
        bits ^= bit
