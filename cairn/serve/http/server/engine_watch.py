"""The engine's processes, with what a server asks of its engine besides: signs of life, and a look inside."""

from cairn.serve.engine.messages import Stats
from cairn.serve.engine.step_times import StepTimes
from cairn.serve.engine_processes import EngineProcesses


class WatchedProcesses(EngineProcesses):
    def stats(self) -> Stats:
        return self.client.stats

    def recent(self) -> list[StepTimes]:
        return list(self.client.recent.copy())

    def watch(self, seconds: float) -> None:
        self.client.watch(seconds)

    def page_map(self) -> str:
        return self.client.pages

    def restarting(self) -> str | None:
        return self.client.restarting

    def dead(self) -> str | None:
        if self._closed:
            return "the engine is closed"
        over = self.client._over
        return None if self.client.alive else str(over or "the engine is being closed")
