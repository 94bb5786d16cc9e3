"""Which GPUs are free, and where a gang could go: nodes in groups of equal state, each group one long bit set.

    state (8,)        bits of the nodes with all 8 GPUs idle
    state (5,)        ... 5 idle
    state (3, 350)    ... 3 idle, and one shared GPU with 350/1000 left

A search looks at each state once, however many nodes there are: a policy scores states (`Rule`), not nodes, and the
lowest bit of the best group is the node. A gang gets all of its pieces or None. Knows no jobs and no time.
"""

from collections.abc import Callable, Iterator

from cairn.cluster.simulate.jobs import MILLI, Cluster, Piece, Pieces

State = tuple[int, ...]  # idle GPUs, then what shared ones have left, ascending
Rule = Callable[[State, int, int], float]  # state, GPUs, milli -> cost; the least is taken


def tightest(state: State, gpus: int, milli: int) -> float:
    """Best fit: the fewest idle GPUs after it, and a shared GPU before an idle one."""
    if milli < MILLI:
        left = [share for share in state[1:] if share >= milli]
        return min(left) - milli - MILLI if left else state[0] * MILLI
    return state[0] * MILLI + sum(state[1:])


def loosest(state: State, gpus: int, milli: int) -> float:
    """Worst fit: spread over the emptiest nodes."""
    return -state[0] * MILLI - sum(state[1:])


class Free:
    def __init__(self, cluster: Cluster) -> None:
        self.gpus = cluster.gpus
        self.idle = cluster.total  # GPUs that nobody uses, not even in part
        self.masks = [(1 << cluster.gpus) - 1] * cluster.nodes  # of idle GPUs
        self.shared: list[dict[int, int]] = [{} for _ in range(cluster.nodes)]  # GPU -> left
        self.state: list[State] = [(cluster.gpus,)] * cluster.nodes
        self.groups: dict[State, int] = {(cluster.gpus,): (1 << cluster.nodes) - 1}
        self.racks = [
            ((1 << min(cluster.rack, cluster.nodes - begin)) - 1) << begin
            for begin in range(0, cluster.nodes, cluster.rack)
        ]
        self._rack = cluster.rack
        self._too_many: int | None = None  # forgotten whenever a node changes
        self._costs: dict[tuple[Rule, int, int], dict[State, float]] = {}

    def find(
        self, gpus: int, milli: int, rule: Rule, *, avoid: int = 0, packed: bool = False
    ) -> Pieces | None:
        """All pieces of a gang, or None. `avoid` are nodes not to use; `packed` keeps it in few racks."""
        whole, rest = divmod(gpus, self.gpus)
        if milli == MILLI and whole and (whole > 1 or rest):
            return self._gang(whole, rest, rule, avoid, packed)
        node = self._node(gpus, milli, rule, avoid, packed)
        return None if node is None else (self._piece(node, gpus, milli),)

    def _node(self, gpus: int, milli: int, rule: Rule, avoid: int, packed: bool) -> int | None:
        best, cost = 0, float("inf")
        known = self._costs.setdefault((rule, gpus, milli), {})
        for state, nodes in self.groups.items():
            if state[0] < gpus and not (milli < MILLI and state[-1] >= milli and len(state) > 1):
                continue
            if avoid and not nodes & ~avoid:
                continue
            found = known.get(state)
            if found is None:  # states are few, and come again and again
                found = known[state] = rule(state, gpus, milli)
            if found <= cost:
                nodes = nodes & ~avoid if avoid else nodes
                if found < cost or nodes & -nodes < best & -best:  # of equal ones the lowest node
                    best, cost = nodes, found
        if not best:
            return None
        if packed and len(self.racks) > 1:
            best = self._rack_in_use(best)
        return (best & -best).bit_length() - 1

    def _rack_in_use(self, nodes: int) -> int:
        """Those of the nodes whose rack has the fewest idle nodes: whole racks stay for gangs."""
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
        pieces = [self._piece(node, self.gpus, MILLI) for node in _bits(chosen)]
        if rest:
            node = self._node(rest, MILLI, rule, avoid | chosen, packed)
            if node is None:
                return None
            pieces.append(self._piece(node, rest, MILLI))
        return tuple(pieces)

    def _few_racks(self, idle: int, count: int) -> int:
        """The tightest rack that has enough; otherwise the fullest racks until there are enough."""
        parts = [part for rack in self.racks if (part := idle & rack)]
        enough = [part for part in parts if part.bit_count() >= count]
        if enough:
            return lowest_bits(min(enough, key=int.bit_count), count)
        chosen = 0
        for part in sorted(parts, key=int.bit_count, reverse=True):
            wanted = min(part.bit_count(), count - chosen.bit_count())
            chosen |= lowest_bits(part, wanted)
        return chosen

    def _piece(self, node: int, gpus: int, milli: int) -> Piece:
        if milli < MILLI:
            left = {gpu: share for gpu, share in self.shared[node].items() if share >= milli}
            if left:
                return node, 1 << min(left, key=lambda gpu: (left[gpu], gpu)), milli
        return node, lowest_bits(self.masks[node], gpus), milli

    def take(self, pieces: Pieces) -> None:
        for node, mask, milli in pieces:
            idle, shared = self.masks[node] & mask, self.shared[node]
            if milli == MILLI:
                if idle != mask:
                    raise RuntimeError(f"node {node}: GPUs {mask:b} are not all idle ({idle:b})")
            else:
                gpu = mask.bit_length() - 1
                left = MILLI if idle else shared.get(gpu, 0)
                if left < milli:
                    raise RuntimeError(f"node {node} GPU {gpu}: {left}/1000 left, {milli} wanted")
                shared[gpu] = left - milli
            self.masks[node] &= ~mask
            self.idle -= idle.bit_count()
            self._changed(node)

    def give(self, pieces: Pieces) -> None:
        for node, mask, milli in pieces:
            freed = mask
            if milli < MILLI:
                gpu, shared = mask.bit_length() - 1, self.shared[node]
                shared[gpu] += milli
                freed = mask if shared[gpu] == MILLI else 0
                if freed:
                    del shared[gpu]
            if self.masks[node] & freed:
                raise RuntimeError(f"node {node}: GPUs {freed:b} are given back twice")
            self.masks[node] |= freed
            self.idle += freed.bit_count()
            self._changed(node)

    def _changed(self, node: int) -> None:
        bit, old, shared = 1 << node, self.state[node], self.shared[node]
        idle = self.masks[node].bit_count()
        new = (idle, *sorted(shared.values())) if shared else (idle,)
        if new == old:
            return
        self._too_many = None
        rest = self.groups[old] & ~bit
        if rest:
            self.groups[old] = rest
        else:
            del self.groups[old]
        self.groups[new] = self.groups.get(new, 0) | bit
        self.state[node] = new

    def racks_of(self, pieces: Pieces) -> int:
        return len({node // self._rack for node, _, _ in pieces})

    def largest(self) -> int:
        """Most idle GPUs of one node."""
        return max(state[0] for state in self.groups)

    def too_many(self) -> int:
        """So many whole GPUs, or more, do not fit, wherever they would go."""
        if self._too_many is None:
            nodes = self.idle_nodes()
            most = min(self.idle, (nodes + 1) * self.gpus - 1) if nodes else self.largest()
            self._too_many = most + 1
        return self._too_many

    def idle_nodes(self) -> int:
        return self.groups.get((self.gpus,), 0).bit_count()


def lowest_bits(bits: int, count: int) -> int:
    chosen = 0
    for _ in range(count):
        bit = bits & -bits
        chosen |= bit
        bits ^= bit
    return chosen


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _bits(bits: int) -> Iterator[int]:
    while bits:
        bit = bits & -bits
        yield bit.bit_length() - 1
        bits ^= bit
