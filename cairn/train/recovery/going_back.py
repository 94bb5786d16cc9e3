"""Where a run can go back to: the newest state that memory still holds of every rank, unless the disk has a newer one.

    agents' holdings + which generation had how many ranks  ->  Recall | None (the disk)

A generation is one layout's numbering of copies. Copies of steps that are not gone on from are forgotten, so that two
histories never mix. Asks the agents; starts nothing.
"""

from pathlib import Path

from cairn.core.shared_secret import Secret
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.peer_placement import recovery_point
from cairn.train.checkpoint.peer_recall import Recall, ask_holdings, forget

FOREVER = 2**62


class GoingBack:
    def __init__(
        self, addresses: tuple[str, ...], checkpoints: Path, secret: Secret | None = None
    ) -> None:
        self.addresses, self.checkpoints, self.secret = addresses, checkpoints, secret
        self.generation = 0
        self.worlds: dict[int, int] = {}  # generation -> ranks
        self.trusted = True  # whether memory may be gone on from

    def newest(self) -> Recall | None:
        if not self.trusted:
            self.trusted = True  # what lay there is forgotten; what comes next is good again
            return None
        holdings = {
            node: ask_holdings(address, self.secret) for node, address in enumerate(self.addresses)
        }
        points = [
            point
            for generation, world in self.worlds.items()
            if (point := recovery_point(holdings, generation, world)) is not None
        ]
        best = max(points, key=lambda point: point.step, default=None)
        return best if best is not None and best.step >= self.disk_step() else None

    def disk_step(self) -> int:
        complete = folders.complete_steps(self.checkpoints)
        return complete[-1] if complete else 0

    def set_out(self, recall: Recall | None, world: int) -> int:
        """The step from which the next epoch goes on; the copies after it are forgotten."""
        if recall is None or self.worlds.get(recall.generation) != world:
            self.generation += 1
        else:
            self.generation = recall.generation
        self.worlds[self.generation] = world
        for address in self.addresses:
            if recall is not None:
                forget(address, recall.generation, recall.step, self.secret)
            else:
                forget(address, self.generation, -1, self.secret)
        return recall.step if recall is not None else self.disk_step()

    def forget_other_layouts(self, world: int) -> None:
        """Once memory holds a step of this layout, what another one has left there is not needed."""
        if len(self.worlds) > 1:
            for address in self.addresses:
                forget(address, self.generation, FOREVER, self.secret)
            self.worlds = {self.generation: world}
