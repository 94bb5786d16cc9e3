"""Each collective as views of tensors laid over the slots of a program.

    all_reduce       slots = chunks of the tensor, in place
    all_gather       slots = the outputs, the own one filled first
    reduce_scatter   slots = the inputs; those that the program changes are copies, the own one the output
    all_to_all       slots = the inputs, then the outputs, of any sizes
    broadcast, reduce, gather, scatter

The ranks stand in a schedule in the order of their hosts, so that a ring crosses each border between
hosts once, however the ranks were numbered. Everything here blocks; `group` makes it asynchronous.
Tensors are flat, contiguous and detached when they come here.
"""

from collections.abc import Sequence

import torch

from cairn.comm.cost import LinkCost
from cairn.comm.schedule.ops import Collective, CollectiveSchedule
from cairn.labs.torch_backend import reduction
from cairn.labs.torch_backend.choice import Places, choose
from cairn.labs.torch_backend.executor import Executor
from cairn.labs.torch_backend.flight_recorder import FlightRecorder
from cairn.labs.torch_backend.hang_detector import HangDetector
from cairn.labs.torch_backend.options import Options
from cairn.labs.torch_backend.program import (
    Program,
    gather_program,
    lower,
    program_of,
    scatter_program,
)
from cairn.labs.torch_backend.rendezvous import COLLECTIVE, Mesh
from cairn.labs.torch_backend.wire import Call

KEPT_SHAPES = 64
ALIGNED = 16  # elements: chunks begin where vector instructions like it


class Collectives:
    def __init__(
        self, mesh: Mesh, guard: HangDetector, options: Options, flight: FlightRecorder
    ) -> None:
        self.rank, self.ranks = mesh.rank, len(mesh.hosts)
        hosts = list(dict.fromkeys(mesh.hosts))
        self.order = sorted(range(self.ranks), key=lambda r: (hosts.index(mesh.hosts[r]), r))
        self.place = self.order.index(self.rank)
        self.places = Places(tuple(hosts.index(mesh.hosts[r]) for r in self.order))
        self._guard, self._options, self._flight = guard, options, flight
        self._network = LinkCost(alpha_us=options.tcp_alpha_us, gb_per_s=options.tcp_gbit / 8)
        self._executor = Executor(
            mesh.links[COLLECTIVE], mesh.names, self.order, guard, options.spin_us
        )
        self._programs: dict[tuple[Collective, int, int], Program] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._staged: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}
        self.sequence = 0

    def all_reduce(
        self, flat: torch.Tensor, reduce: str, timeout_s: float, operation: str = "all_reduce"
    ) -> None:
        """Reduce `flat` in place."""
        combine = reduction.combine(reduce, flat.dtype)
        program = self._program("all_reduce", flat.nbytes)
        views = _chunks(flat, program.chunks)
        views += self._staging(program, views)
        call = self._call(operation, flat.dtype, flat.nbytes, reduce)
        self._run(call, program, views, timeout_s, combine)
        reduction.finish(reduce, flat, self.ranks)

    def all_gather(
        self, outputs: Sequence[torch.Tensor], mine: torch.Tensor, timeout_s: float
    ) -> None:
        """`outputs` by rank; sizes may differ from rank to rank."""
        own = outputs[self.rank]
        if own.data_ptr() != mine.data_ptr():
            own.copy_(mine)
        total = sum(output.nbytes for output in outputs)
        program = self._program("all_gather", total)
        call = self._call("all_gather", mine.dtype, total)
        self._run(call, program, [outputs[rank] for rank in self.order], timeout_s)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduce: str, timeout_s: float
    ) -> None:
        """`inputs` by rank, and not changed, unless the output lies in them."""
        combine = reduction.combine(reduce, output.dtype)
        total = sum(part.nbytes for part in inputs)
        program = self._program("reduce_scatter", total)
        output.copy_(inputs[self.rank])
        views = [inputs[rank] for rank in self.order]
        for place in range(self.ranks):
            if place == self.place:
                views[place] = output
            elif place in program.written:
                views[place] = views[place].clone()
        views += self._staging(program, views)
        call = self._call("reduce_scatter", output.dtype, total, reduce)
        self._run(call, program, views, timeout_s, combine)
        reduction.finish(reduce, output, self.ranks)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], timeout_s: float
    ) -> None:
        """Both by rank; each pair of ranks agrees on its own size."""
        program = self._program("all_to_all", 0)
        views = [inputs[rank] for rank in self.order] + [outputs[rank] for rank in self.order]
        call = self._call("all_to_all", views[0].dtype, 0)
        self._run(call, program, views, timeout_s)

    def broadcast(self, flat: torch.Tensor, root: int, timeout_s: float) -> None:
        program = self._program("broadcast", flat.nbytes, root)
        call = self._call("broadcast", flat.dtype, flat.nbytes, root=root)
        self._run(call, program, _chunks(flat, program.chunks), timeout_s)

    def reduce(self, flat: torch.Tensor, root: int, reduce: str, timeout_s: float) -> None:
        """Reduce in place on the root; the tensors of other ranks do not change."""
        combine = reduction.combine(reduce, flat.dtype)
        program = self._program("reduce", flat.nbytes, root)
        result = flat if self.rank == root else flat.clone()
        call = self._call("reduce", flat.dtype, flat.nbytes, reduce, root)
        self._run(call, program, _chunks(result, program.chunks), timeout_s, combine)
        if self.rank == root:
            reduction.finish(reduce, result, self.ranks)

    def gather(
        self, outputs: Sequence[torch.Tensor], mine: torch.Tensor, root: int, timeout_s: float
    ) -> None:
        """`outputs` by rank, on the root alone."""
        views = self._by_place(outputs, mine)
        if self.rank == root:
            outputs[root].copy_(mine)
        call = self._call("gather", mine.dtype, 0, root=root)
        program = gather_program(self.ranks, self.place, self.order.index(root))
        self._run(call, program, views, timeout_s)

    def scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int, timeout_s: float
    ) -> None:
        """`inputs` by rank, on the root alone."""
        views = self._by_place(inputs, output)
        if self.rank == root:
            output.copy_(inputs[root])
        call = self._call("scatter", output.dtype, 0, root=root)
        program = scatter_program(self.ranks, self.place, self.order.index(root))
        self._run(call, program, views, timeout_s)

    def barrier(self, timeout_s: float) -> None:
        self.all_reduce(torch.zeros(1, dtype=torch.int32), "sum", timeout_s, "barrier")

    def run_placed(
        self,
        schedule: CollectiveSchedule,
        order: Sequence[int],
        views: Sequence[torch.Tensor],
        operation: str,
        total: int,
        root: int,
        timeout_s: float,
    ) -> None:
        """A sum by a schedule of one's own; `order`: which rank stands at which of its places."""
        program = lower(schedule, order.index(self.rank))
        steps = tuple(
            step if step.peer < 0 else step._replace(peer=self.order.index(order[step.peer]))
            for step in program.steps
        )
        combine = reduction.combine("sum", views[0].dtype)
        call = self._call(operation, views[0].dtype, total, "sum", root)
        self._run(call, program._replace(steps=steps), views, timeout_s, combine)

    def _by_place(self, parts: Sequence[torch.Tensor], own: torch.Tensor) -> list[torch.Tensor]:
        return [parts[rank] for rank in self.order] if parts else [own] * self.ranks

    def _program(self, collective: Collective, size: int, root: int = 0) -> Program:
        """The choice is the same for sizes of as many bits, so that few programs are made."""
        key = (collective, size.bit_length(), root)
        program = self._programs.get(key)
        if program is None:
            options = self._options
            chosen = choose(
                collective,
                self.places,
                (1 << size.bit_length()) - 1,
                self._network,
                options.deterministic,
                options.schedule,
            )
            program = self._programs[key] = program_of(
                collective,
                chosen.name,
                self.ranks,
                self.place,
                self.order.index(root),
                chosen.gpus,
                chosen.chunks,
                chosen.parts,
            )
        return program

    def _staging(self, program: Program, views: list[torch.Tensor]) -> list[torch.Tensor]:
        """Slots beyond the vector hold what comes of one chunk: the only one, or the own one."""
        extra = program.slots - program.chunks
        if extra <= 0:
            return []
        like = views[self.place if program.chunks == self.ranks else 0]
        key = (extra, like.numel(), like.dtype)
        buffers = self._staged.get(key)
        if buffers is not None:
            return buffers
        needed = extra * like.nbytes
        if self._scratch.numel() < needed or len(self._staged) >= KEPT_SHAPES:
            self._staged.clear()  # they are views of the scratch
            self._scratch = torch.empty(max(needed, self._scratch.numel()), dtype=torch.uint8)
        staging = self._scratch[:needed].view(like.dtype)
        views_of = self._staged[key] = list(staging.view(extra, like.numel()).unbind())
        return views_of

    def _call(
        self, operation: str, dtype: torch.dtype, total: int, reduce: str = "none", root: int = 0
    ) -> Call:
        self.sequence += 1
        return Call(operation, self.sequence, dtype, reduce, root, total)

    def _run(
        self,
        call: Call,
        program: Program,
        views: Sequence[torch.Tensor],
        timeout_s: float,
        combine: reduction.Combine | None = None,
    ) -> None:
        """Whatever goes wrong is reported to all ranks, and the group ends."""
        record = self._flight.begin(call)
        self._guard.begin(call)
        record.admitted = True
        try:
            self._executor.run(call, program, views, combine, timeout_s)
        except Exception as error:
            self._guard.stop(str(error))
            raise
        self._flight.end(record)
        self._guard.end(call)


def _chunks(flat: torch.Tensor, chunks: int) -> list[torch.Tensor]:
    """Equal parts; the last ones are shorter, or empty."""
    if chunks == 1:
        return [flat]
    total = flat.numel()
    each = -(-total // chunks)
    each = -(-each // ALIGNED) * ALIGNED if each > ALIGNED else each
    return [flat[min(c * each, total) : min((c + 1) * each, total)] for c in range(chunks)]
