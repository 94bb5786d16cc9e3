"""The engine's own process: reads commands between two steps, takes a step, reports what it brought.

    stdin: Boot | commands -> engine.step() -> Tokens | Beat from a thread of its own, also while a step hangs

While there is work, inputs are taken without waiting; without work it sleeps on the socket. SIGTERM and `Stop` end it
in good order, an exception with its traceback as the last message, and the end of its parent at once. SIGUSR1 writes
the stacks of all threads to a file, to find out why nothing moves.

With several ranks each runs this file. Rank 0 reads the client's commands and passes each on, in the same order and
before the same step; schedulers are deterministic, so all ranks take the same steps, row by row. That is less to send
than decisions are, and nothing about a step needs a form on the wire.
"""

import faulthandler
import logging
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from cairn.core.errors import CairnError, RequestError
from cairn.core.garbage_collection import keep_what_is_loaded
from cairn.models.shards import ALONE
from cairn.serve.config import RoleConfig
from cairn.serve.engine.adapters import LoadedAdapter
from cairn.serve.engine.constraint import follow
from cairn.serve.engine.facts import facts_of
from cairn.serve.engine.failure import is_fatal
from cairn.serve.engine.loop import Engine, Output
from cairn.serve.engine.messages import (
    Abort,
    Admit,
    Begun,
    Boot,
    Call,
    CheckSleep,
    Command,
    Ended,
    FollowPages,
    LoadAdapter,
    LoadWeights,
    Pages,
    Pause,
    Ready,
    Report,
    ResetPrefixCache,
    Resume,
    Returned,
    Sleep,
    Stop,
    Stopped,
    Submit,
    SwitchRole,
    Tokens,
    UnloadAdapter,
    Wake,
    Watch,
    decode_boot,
    decode_commands,
    encode,
)
from cairn.serve.engine.page_events import PageEvents
from cairn.serve.engine.ranks import all_or_none, join_ranks
from cairn.serve.engine.request import Request
from cairn.serve.engine.start import Started, start
from cairn.serve.engine.worker_life import Pulse, connect, leave, leave_with_parent, report_failure
from cairn.serve.grammar import Grammar, grammars_for

IDLE_MS = 200  # how often an idle worker looks whether it has to stop
COMPILE_MS = 2  # the same while it waits for nothing but a grammar or an adapter
STACKS = "stacks"
log = logging.getLogger("cairn")
T = TypeVar("T")


class Worker:
    """Worker of one rank: its engine and its connections to the client and the other ranks."""

    def __init__(self, boot: Boot, started: Started, context: zmq.Context) -> None:
        self.boot, self.engine, self.eos_ids = boot, started.engine, started.opened.eos_ids
        self._grammars = grammars_for(started.opened, self.engine.scheduler.limits.vocabulary)
        self.watched_until = 0.0  # the engine is watched until then, on time.monotonic
        self._pages: PageEvents | None = None  # while the prefix cache's events are followed
        self.stop_at: float | None = None  # when the grace period ends; None: not stopping
        self._open: dict[int, None] = {}  # requests in the engine, in the order they came
        self._compiling: dict[
            int, tuple[Request, Future[Grammar]]
        ] = {}  # and those that wait for their grammar
        # Adapters that are being read, by the number of their call, beside the steps of a rank that is alone.
        self._reading: dict[int, tuple[LoadAdapter, Future[LoadedAdapter]]] = {}
        self._reader = ThreadPoolExecutor(1, "adapters")
        size = boot.config.tensor_parallel_size
        folder, first = boot.folder, boot.rank == 0
        name = "commands" if first else f"orders-{boot.rank}"
        self._inbox = connect(context, zmq.PULL, folder, name)
        self._outbox = connect(context, zmq.PUSH, folder, "reports")
        self._followers = [context.socket(zmq.PUSH) for _ in range(size - 1 if first else 0)]
        for rank, socket in enumerate(self._followers, start=1):
            socket.bind(f"ipc://{folder}/orders-{rank}")

    def ready(self, notes: list[str]) -> None:
        if self._grammars is not None:
            self._grammars.warm_up()
        limits, facts = self.engine.scheduler.limits, facts_of(self.engine)
        self._report(Ready(limits, list(self.eos_ids), notes, facts))

    def serve(self) -> None:
        """Until it is stopped."""
        while not self._done():
            commands = self._next_commands()
            if not commands and not self.engine.has_work:
                continue
            for follower in self._followers:
                follower.send(encode(commands))
            self._carry_out(commands)
        for follower in self._followers:
            follower.send(encode([Stop(0.0)]))
        self._report(Stopped())

    def follow(self) -> None:
        """Loop of the ranks above 0: execute commands of rank 0 until it sends stop."""
        while True:
            commands = decode_commands(self._inbox.recv())
            if any(isinstance(command, Stop) for command in commands):
                return
            self._carry_out(commands)

    def ask_to_stop(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        self.stop_at = deadline if self.stop_at is None else min(self.stop_at, deadline)

    def _done(self) -> bool:
        if self.stop_at is None:
            return False
        if time.monotonic() > self.stop_at and not self._open:
            return True  # pages that another server has not read yet are lost to it
        return not self.engine.has_work and not self._compiling

    def _next_commands(self) -> list[Command]:
        """Return arrived commands, waiting if there is nothing else to do; handle those for rank 0 alone."""
        commands: list[Command] = []
        waited_for = [*self._compiling.values(), *self._reading.values()]
        ready = any(future.done() for _, future in waited_for)
        idle_ms = 0 if ready else COMPILE_MS if waited_for else IDLE_MS
        if self.engine.has_work or self._inbox.poll(idle_ms):
            with suppress(zmq.Again):
                while True:
                    commands += decode_commands(self._inbox.recv(zmq.NOBLOCK))
        for command in commands:
            if isinstance(command, Stop):
                self.ask_to_stop(command.grace_s)
            elif isinstance(command, Watch):
                self.watched_until = time.monotonic() + command.seconds
        if self._followers:  # every rank has to draw the same numbers
            commands = [_seeded(command) for command in commands]
        if self.stop_at is not None and time.monotonic() > self.stop_at:
            commands += [Abort(id) for id in self._open]
        commands += [Admit(id) for id, (_, future) in self._compiling.items() if future.done()]
        commands = [command for command in commands if not isinstance(command, Stop | Watch)]
        return (
            commands if self.boot.config.tensor_parallel_size > 1 else self._read_beside(commands)
        )

    def _read_beside(self, commands: list[Command]) -> list[Command]:
        """A thread reads adapters while steps go on; their commands follow when it is done."""
        others: list[Command] = []
        for command in commands:
            if isinstance(command, LoadAdapter) and command.beside:
                future = self._reader.submit(self.engine.read_adapter, command.folder)
                self._reading[command.call] = command, future
            else:
                others.append(command)
        return others + [command for command, future in self._reading.values() if future.done()]

    def _carry_out(self, commands: Sequence[Command]) -> None:
        ended = [end for command in commands for end in self._obey(command)]
        outputs = self.engine.step() if self.engine.has_work else []
        self._tell_pages()
        if self.boot.rank == 0 and (outputs or ended):
            self._report(self._tokens(outputs, ended))
        for output in outputs:
            if output.finished:
                self.engine.prompt_logprobs.pop(output.request, None)
                self.engine.pools.pop(output.request)  # of a rank that reports nothing
                self._open.pop(_number(output.request.id), None)

    def _obey(self, command: Command) -> list[Ended]:
        """Carry out a command; what it ends."""
        ended: Ended | None = None
        match command:
            case Abort(id):
                ended = self._abort(id)
            case Admit(id) if id in self._compiling:
                ended = self._admit(*self._compiling.pop(id))
            case Submit():
                ended = self._submit(command)
            case _ if isinstance(command, Call):
                return self._call(command)
        return [] if ended is None else [ended]

    def _call(self, command: Call) -> list[Ended]:
        """Every rank does the same; rank 0 reports how it went."""
        ended: list[Ended] = []
        try:
            match command:
                case Pause(keep=keep):
                    self.engine.pause()
                    if not keep:
                        aborted = [self._abort(id) for id in list(self._open)]
                        ended = [one for one in aborted if one is not None]
                case Resume():
                    self.engine.resume()
                case Sleep(level=level):
                    self._on_all_ranks(lambda: self.engine.check_sleep(level), "sleep")
                    self.engine.sleep(level)
                case CheckSleep(level=level):
                    self.engine.check_sleep(level)
                case Wake():
                    self.engine.wake()
                case LoadWeights(version=version, source=source):
                    self.engine.load_weights(version, source)
                case LoadAdapter():
                    self._load_adapter(command)
                case UnloadAdapter(number=number):
                    for call, (load, _) in list(self._reading.items()):
                        if load.number == number and call < command.call:  # nobody waits for it
                            del self._reading[call]
                    self.engine.unload_adapter(number)
                case ResetPrefixCache():
                    self.engine.reset_prefix_cache()
                case SwitchRole(role=role):
                    self.engine = with_role_of(self.engine, role)
                case FollowPages() if self.boot.rank == 0:
                    self._pages = self.engine.scheduler.blocks.prefix.follow()
        except CairnError as problem:
            if is_fatal(problem):
                raise
            kind = type(problem).__name__
            self._report(Returned(command.call, kind, problem.message, problem.hint))
        else:
            self._tell_pages()
            self._report(Returned(command.call))
        return ended

    def _load_adapter(self, command: LoadAdapter) -> None:
        beside, folder = self._reading.pop(command.call, None), command.folder
        adapter = self._on_all_ranks(
            lambda: self.engine.read_adapter(folder) if beside is None else beside[1].result(),
            f"read the adapter in {folder}",
        )
        self.engine.load_adapter(command.number, adapter)

    def _on_all_ranks(self, act: Callable[[], T], what: str) -> T:
        """A CairnError on one rank is one on all: ranks that differ take other steps, and wait for each other."""
        result, problem = [], None
        try:
            result.append(act())
        except CairnError as error:
            problem = error
            if self.boot.rank:  # rank 0 reports its own
                log.error("rank %s: %s", self.boot.rank, error)
        alone = self.boot.config.tensor_parallel_size == 1
        shards = ALONE if alone else self.engine.runner.model.build.shards
        all_or_none(shards, problem, f"another rank could not {what}; its log says why")
        return result[0]

    def _tell_pages(self) -> None:
        if self._pages is not None and (events := self._pages.take()):
            self._report(Pages(list(events)))

    def _abort(self, id: int) -> Ended | None:
        self._open.pop(id, None)
        if id in self._compiling:
            request, _ = self._compiling.pop(id)
            request.finish = "abort"
            return ended_of(request)
        request = self.engine.abort(id)
        return None if request is None else ended_of(request)

    def _submit(self, command: Submit) -> Ended | None:
        request = Request(
            command.id,
            command.prompt,
            command.params,
            priority=command.priority,
            salt=command.salt,
            eos_ids=command.eos_ids,
            identity=command.identity,
            adapter=command.adapter,
            outputs=command.outputs,
            pieces=command.pieces,
            pictures=command.pictures,
            reader=command.reader,
        )
        try:
            if self.stop_at is not None:
                raise RequestError("the engine is stopping", hint="try again when it is back")
            if command.guide is None:
                self.engine.add(request)
            elif self._grammars is None:
                raise RequestError(f"{command.guide.field} is given, and there is no tokenizer")
            else:  # beside the loop: the tokens of all others would wait for it
                request.ledger.arrived = self.engine.clock()
                self._compiling[command.id] = request, self._grammars.compile_later(command.guide)
            self._open[command.id] = None
        except RequestError as problem:
            return self._refuse(request, problem)
        return None

    def _admit(self, request: Request, compiled: "Future[Grammar]") -> Ended | None:
        """Other ranks than the first may have to wait for the rest of their own compilation."""
        try:
            request.constraint = compiled.result().start()
            follow(request.constraint, request.outputs)
            self.engine.add(request)
        except RequestError as problem:
            return self._refuse(request, problem)
        return None

    def _refuse(self, request: Request, problem: RequestError) -> Ended:
        self._open.pop(_number(request.id), None)
        request.finish, request.error = "error", str(problem)
        return ended_of(request)

    def _tokens(self, outputs: list[Output], ended: list[Ended]) -> Tokens:
        ids, tokens, counts, logprobs, prompts, begun, pooled = [], [], [], {}, {}, {}, {}
        for output in outputs:
            request, number = output.request, _number(output.request.id)
            if output.tokens:
                ids.append(number)
                tokens += output.tokens
                counts.append(len(output.tokens))
                if output.logprobs is not None:
                    logprobs[number] = output.logprobs
                if len(request.outputs) == len(output.tokens):  # its first
                    if not output.finished:
                        begun[number] = Begun(request.cached, request.ledger)
                    if request in self.engine.prompt_logprobs:
                        prompts[number] = self.engine.prompt_logprobs[request]
                    if (vector_D := self.engine.pools.pop(request)) is not None:
                        pooled[number] = vector_D.tobytes()
            if output.finished:
                ended.append(ended_of(request))
        counts = [] if len(tokens) == len(ids) else counts
        return Tokens(
            self.engine.steps, ids, tokens, logprobs, prompts, ended, begun, pooled, counts
        )

    def _report(self, report: Report) -> None:
        if self.boot.rank == 0:
            self._outbox.send(encode(report))


def with_role_of(engine: Engine, role: RoleConfig) -> Engine:
    from cairn.serve.separation.roles import (
        with_role,
    )  # needs a transport, which most engines do not

    return with_role(engine, role)


def ended_of(request: Request) -> Ended:
    return Ended(
        _number(request.id),
        request.finish or "abort",
        request.stop_reason,
        request.error,
        request.cached,
        request.ledger,
        request.handoff,
    )


def _number(id: str | int) -> int:
    return int(id)


def _seeded(command: Command) -> Command:
    if not isinstance(command, Submit) or command.params.seed is not None:
        return command
    params = msgspec.structs.replace(command.params, seed=secrets.randbits(63))
    return msgspec.structs.replace(command, params=params)


# -- the process --------------------------------------------------------------------------------


def main() -> int:
    boot = decode_boot(sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(4), "little")))
    stacks = (Path(boot.folder) / f"{STACKS}-{boot.rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent as well, which decides
    threading.Thread(target=leave_with_parent, args=(boot.folder,), daemon=True).start()
    context = zmq.Context()
    pulse = Pulse(boot, context)
    pulse.start()
    try:
        started = start(boot.config, join_ranks(boot.config, boot.rank, boot.folder))
        if boot.role is not None:
            started = started._replace(engine=with_role_of(started.engine, boot.role))
        worker = Worker(boot, started, context)
        if boot.rank == 0:
            signal.signal(signal.SIGTERM, lambda *_: worker.ask_to_stop(boot.grace_s))
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 says when
        pulse.worker = worker
        keep_what_is_loaded()
        worker.ready(started.notes)
        worker.serve() if boot.rank == 0 else worker.follow()
    except BaseException as problem:  # noqa: BLE001  whatever it was, the client has to hear it
        report_failure(boot, problem)
        leave(1)
    pulse.stopped.set()
    pulse.join()
    context.destroy(linger=2000)
    leave(0)


if __name__ == "__main__":
    sys.exit(main())
