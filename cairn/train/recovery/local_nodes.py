"""The nodes of a run on one machine: which are used, which are left out and why, and what was laid to them.

Knows neither processes nor a clock: the driver starts the ranks, and says when something happened.
"""

from cairn.train.parallel.layout import Layout
from cairn.train.recovery.ladder import Response, Survivors


class LocalNodes:
    def __init__(self, layout: Layout, nodes: int, spares: int) -> None:
        """`layout`: that the run was asked for; the spares are not used until a node is lost."""
        self.layout = layout
        self.used = list(range(nodes))
        self.strikes: dict[int, int] = {}  # node -> failures laid to it
        self.cordoned: dict[int, str] = {}  # node -> why it is not used
        self.failures = 0
        self._count = nodes + spares
        self._per_node = -(-layout.world() // nodes)
        self._lost_at: dict[int, float] = {}

    def blame(self, node: int | None) -> None:
        """A failure, laid to this node; None: to the run."""
        self.failures += 1
        if node is not None:
            self.strikes[node] = self.strikes.get(node, 0) + 1

    def survivors(self) -> Survivors:
        unused = (node for node in range(self._count) if node not in self.used)
        return Survivors(
            layout=self.layout,
            nodes=tuple(self.used),
            spares=tuple(node for node in unused if node not in self.cordoned),
            ranks_per_node=self._per_node,
            strikes=self.strikes,
            failures=self.failures,
        )

    def apply(self, response: Response, why: str, now: float) -> None:
        self.used = list(response.nodes) or self.used
        for node in response.cordon:
            self.cordoned[node] = why
            self._lost_at[node] = now

    def lost_before(self, moment: float) -> tuple[int, ...]:
        return tuple(node for node, at in self._lost_at.items() if at < moment)

    def take_back(self, back: tuple[int, ...], used: tuple[int, ...]) -> None:
        """Nodes that were lost, with a clean record."""
        for node in back:
            for table in (self.cordoned, self._lost_at, self.strikes):
                table.pop(node, None)
        self.used = sorted(used)
