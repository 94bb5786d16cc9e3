"""The engine's processes, with the two signs of life that a server asks for."""

from cairn.serve.engine.messages import Stats
from cairn.serve.engine_processes import EngineProcesses


class WatchedProcesses(EngineProcesses):
    def stats(self) -> Stats:
        return self.client.stats

    def dead(self) -> str | None:
        if self._closed:
            return "the engine is closed"
        over = self.client._over
        return None if self.client.alive else str(over or "the engine is being closed")
