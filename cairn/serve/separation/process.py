"""The prefill side in a process of its own: the same verbs, over a pipe.

    add, abort --Command--> pipe --> PrefillSide.step, again and again --Handoff | Ended--> step

The process ends with its parent, whose end of the pipe closes. If it ends before, every request that it had ends with
the reason, and what is added later is refused instead of waiting.
"""

import contextlib
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from cairn.core.errors import CairnError, ConfigError
from cairn.serve.config import EngineConfig
from cairn.serve.separation.prefill import Ask, Ended, Handoff, PrefillSide

READY_S = 600.0  # to load a model
IDLE_S = 0.2  # between two looks when nothing is held for anybody
HELD_S = 0.005  # and when a reader may be through any moment


class Abort(msgspec.Struct, frozen=True, tag=True):
    id: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    address: str


class Broken(msgspec.Struct, frozen=True, tag=True):
    error: str
    hint: str | None = None


Command = Ask | Abort
Report = Ready | Broken | Handoff | Ended
_commands, _reports = msgspec.msgpack.Decoder(Command), msgspec.msgpack.Decoder(list[Report])


class PrefillProcess:
    def __init__(
        self,
        config: EngineConfig,
        *,
        transport: str = "shm",
        staged: bool | None = None,
        threads: int = 1,
    ) -> None:
        """Loads the model of `config` over there; returns when it is ready."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        settings: Any = (theirs, msgspec.json.encode(config), transport, staged, threads)
        self._process = context.Process(target=_serve, args=settings, daemon=True, name="prefill")
        self._process.start()
        theirs.close()
        self._asked: dict[str, None] = {}
        self._over: str | None = None
        self.address = self._first_word()

    @property
    def has_work(self) -> bool:
        return bool(self._asked)

    def add(self, ask: Ask) -> None:
        if self._over is not None:
            raise ConfigError(self._over, hint="start the prefill process again")
        self._asked[ask.id] = None
        self._send(ask)

    def abort(self, id: str) -> None:
        self._asked.pop(id, None)
        self._send(Abort(id))

    def step(self, wait_s: float = 0.0) -> list[Handoff | Ended]:
        replies: list[Handoff | Ended] = []
        try:
            while self._over is None and self._pipe.poll(0.0 if replies else wait_s):
                for report in _reports.decode(self._pipe.recv_bytes()):
                    replies += self._taken(report)
        except (EOFError, OSError):
            self._process.join(5)
            self._end(f"the prefill process has ended (status {self._process.exitcode})")
        if self._over is not None:
            replies += [
                Ended(id=id, token=None, finish="error", error=self._over) for id in self._asked
            ]
            self._asked.clear()
        return replies

    def close(self) -> None:
        self._end("the prefill process was closed")
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _taken(self, report: Report) -> list[Handoff | Ended]:
        match report:
            case Broken(error=error):
                self._end(error)
            case Handoff() | Ended():
                id = report.ask.id if isinstance(report, Handoff) else report.id
                if id in self._asked:  # otherwise it was aborted
                    del self._asked[id]
                    return [report]
        return []

    def _first_word(self) -> str:
        try:
            if not self._pipe.poll(READY_S):
                raise CairnError(f"the prefill process is not ready after {READY_S:g} s")
            (word,) = _reports.decode(self._pipe.recv_bytes())
        except (EOFError, OSError):
            self._process.join(5)
            status = self._process.exitcode
            raise CairnError(
                f"the prefill process ended before it was ready (status {status})",
                hint="a script that starts it needs `if __name__ == '__main__':`",
            ) from None
        except BaseException:
            self.close()
            raise
        if isinstance(word, Broken):
            self.close()
            raise CairnError(word.error, hint=word.hint)
        assert isinstance(word, Ready)
        return word.address

    def _send(self, command: Command) -> None:
        with contextlib.suppress(OSError):  # `step` finds out
            self._pipe.send_bytes(msgspec.msgpack.encode(command))

    def _end(self, reason: str) -> None:
        self._over = self._over or reason
        self._pipe.close()


def _serve(
    pipe: Connection, config: bytes, transport: str, staged: bool | None, threads: int
) -> None:
    """The child's whole life."""
    import torch

    from cairn.serve.engine.start import start

    def tell(reports: Sequence[Report]) -> None:
        pipe.send_bytes(msgspec.msgpack.encode(reports))

    torch.set_num_threads(threads)
    with contextlib.suppress(EOFError, OSError):  # the parent has gone
        try:
            engine = start(msgspec.json.decode(config, type=EngineConfig)).engine
            side = PrefillSide(engine, transport=transport, staged=staged)
        except CairnError as problem:
            tell([Broken(problem.message, problem.hint)])
            return
        tell([Ready(side.address)])
        try:
            while True:
                _take_in(side, pipe, tell)
                replies = side.step()
                if replies:
                    tell(replies)
        finally:
            side.close()


def _take_in(side: PrefillSide, pipe: Connection, tell: Callable[[Sequence[Report]], None]) -> None:
    wait_s = 0.0 if side.has_work else HELD_S if side.holding else IDLE_S
    while pipe.poll(wait_s):
        wait_s = 0.0
        command = _commands.decode(pipe.recv_bytes())
        if isinstance(command, Abort):
            side.abort(command.id)
            continue
        try:
            side.add(command)
        except CairnError as problem:
            tell([Ended(id=command.id, token=None, finish="error", error=str(problem))])
