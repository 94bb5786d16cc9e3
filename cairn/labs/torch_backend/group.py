"""The process group that torch sees: its collectives, in torch's words, over ours.

    torch.distributed --> CairnGroup.allreduce(tensors, options) --> Worker --> Collectives

Torch 2.13 calls `all_gather_single`, older ones `_allgather_base`, and both exist here. Lists that a
single operation can do are one operation; other coalesced forms are done one after another in one
piece of work. Only CPU tensors: on GPUs the collectives are NCCL's.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from cairn.labs.torch_backend import arguments, reduction
from cairn.labs.torch_backend.aggregator import CHUNK_BYTES, POOL, switch_all_reduce
from cairn.labs.torch_backend.arguments import put_back
from cairn.labs.torch_backend.collectives import Collectives
from cairn.labs.torch_backend.errors import CommError
from cairn.labs.torch_backend.flight_recorder import FlightRecorder, write_dump
from cairn.labs.torch_backend.hang_detector import HangDetector
from cairn.labs.torch_backend.options import Options
from cairn.labs.torch_backend.point_to_point import Messages
from cairn.labs.torch_backend.rendezvous import DIRECT, meet
from cairn.labs.torch_backend.sparse import sparse_all_reduce
from cairn.labs.torch_backend.work import Worker

Tensors = list[torch.Tensor]
Base: Any = dist.ProcessGroup  # its stubs have overloads that torch never calls on a subclass


class CairnGroup(Base):
    def __init__(
        self,
        store: Any,
        rank: int,
        world: int,
        names: list[int],
        timeout: timedelta,
        options: Options,
    ) -> None:
        super().__init__(rank, world)
        self._me, self._world, self._names = rank, world, names
        self._timeout_s = timeout.total_seconds()
        self.flight = FlightRecorder(names)
        mesh = meet(store, rank, world, names, timeout, options)
        dump = partial(write_dump, options.dump, names[rank]) if options.dump else lambda: None
        self._guard = HangDetector(mesh, store, dump)
        self.collectives = Collectives(mesh, self._guard, options, self.flight)
        self._messages = Messages(
            mesh.links[DIRECT], rank, names, self._guard, self._timeout_s, self.flight
        )
        self._worker = Worker(f"cairn-rank-{names[rank]}")
        self._vector, self._flat = arguments.vector, arguments.vectors
        self._parts = partial(arguments.parts, world=world)
        self._shares = partial(arguments.shares, world=world)
        self._rows = partial(arguments.rows, world=world)
        self._same = partial(arguments.same, name=names[rank])

    # What torch asks about a group. Without the names FSDP2, DTensor and functional collectives fail.
    def getBackendName(self) -> str:
        return "cairn"

    def setGroupName(self, name: str) -> None:
        self.flight.name = name

    def getGroupName(self) -> str:
        return self.flight.name

    def setGroupDesc(self, desc: str) -> None:
        self.flight.description = desc

    def getGroupDesc(self) -> str:
        return self.flight.description

    def _get_sequence_number_for_group(self) -> int:
        return self.collectives.sequence

    def _set_sequence_number_for_group(self) -> None:
        """Ours begins with 0."""

    # Reductions
    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        reduce = reduction.name_of(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        flats = self._flat("all_reduce", tensors)
        seconds = self._seconds(opts)

        def job() -> None:
            for flat, tensor in zip(flats, tensors, strict=True):
                self.collectives.all_reduce(flat, reduce, seconds)
                put_back(flat, tensor)

        return self._do("all_reduce", job, tensors, opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        """Tensors of one type travel as one."""
        if len({tensor.dtype for tensor in tensors}) != 1 or len(tensors) == 1:
            return self.allreduce(tensors, opts)
        reduce = reduction.name_of(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        flats = self._flat("all_reduce", tensors)
        seconds = self._seconds(opts)

        def job() -> None:
            joined = torch.cat(flats)
            self.collectives.all_reduce(joined, reduce, seconds)
            for part, tensor in zip(
                joined.split([t.numel() for t in tensors]), tensors, strict=True
            ):
                put_back(part, tensor)

        return self._do("all_reduce", job, tensors, opts)

    def sparse_all_reduce(
        self,
        tensor: torch.Tensor,
        block: int,
        most_share: float | None,
        decided: Callable[[float | None], None],
        average: bool = False,
    ) -> dist.Work:
        """Blocks of zeros stay at home; dense when that would take more than `most_share`."""
        flat = self._vector("sparse_all_reduce", tensor)
        reduction.combine("avg" if average else "sum", flat.dtype)  # or refuse the type now

        def job() -> None:
            sparse_all_reduce(self.collectives, flat, block, most_share, decided, self._timeout_s)
            reduction.finish("avg" if average else "sum", flat, self._world)
            put_back(flat, tensor)

        return self._worker.do(job, [tensor], "sparse_all_reduce", True)

    def switch_all_reduce(
        self,
        tensor: torch.Tensor,
        aggregator: int,
        chunk_bytes: int = CHUNK_BYTES,
        pool: int = POOL,
    ) -> dist.Work:
        """The sum of all ranks but `aggregator`, which adds it up for them (see `aggregator`)."""
        flat = self._vector("switch_all_reduce", tensor)
        reduction.combine("sum", flat.dtype)  # or refuse the type now

        def job() -> None:
            sizes = (aggregator, chunk_bytes, pool)
            switch_all_reduce(self.collectives, flat, *sizes, self._timeout_s)
            put_back(flat, tensor)

        return self._worker.do(job, [tensor], "switch_all_reduce", True)

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        reduce, root = reduction.name_of(opts.reduceOp), opts.rootRank
        flats = self._flat("reduce", tensors)
        seconds = self._seconds(opts)

        def job() -> None:
            for flat, tensor in zip(flats, tensors, strict=True):
                self.collectives.reduce(flat, root, reduce, seconds)
                if self._me == root:
                    put_back(flat, tensor)

        return self._do("reduce", job, tensors, opts)

    def reduce_scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> dist.Work:
        parts = [self._parts("reduce_scatter", row) for row in inputs]
        return self._reduce_scatter(outputs, parts, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, whole: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, wholes: Tensors, opts: Any = None
    ) -> dist.Work:
        pairs = zip(outputs, wholes, strict=True)
        parts = [self._shares("reduce_scatter", whole, out.numel()) for out, whole in pairs]
        return self._reduce_scatter(outputs, parts, opts)

    def _reduce_scatter(self, outputs: Tensors, parts: list[Tensors], opts: Any) -> dist.Work:
        reduce = reduction.name_of(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        flats = self._flat("reduce_scatter", outputs)
        seconds = self._seconds(opts)

        def job() -> None:
            for flat, output, row in zip(flats, outputs, parts, strict=True):
                self.collectives.reduce_scatter(flat, row, reduce, seconds)
                put_back(flat, output)

        return self._do("reduce_scatter", job, outputs, opts)

    # Gathers
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        flats = [self._parts("all_gather", row) for row in outputs]
        return self._all_gather(flats, outputs, inputs, opts)

    allgather_coalesced = allgather

    def all_gather_single(
        self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self.all_gather_single_coalesced([output], [mine], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        wholes = self._flat("all_gather", outputs)
        flats = [
            self._shares("all_gather", whole, mine.numel())
            for whole, mine in zip(wholes, inputs, strict=True)
        ]
        back = [[(whole, output)] for whole, output in zip(wholes, outputs, strict=True)]
        return self._all_gather(flats, outputs, inputs, opts, back)

    def _all_gather(
        self, flats: list[Tensors], outputs: Any, inputs: Tensors, opts: Any, back: Any = None
    ) -> dist.Work:
        mine = self._flat("all_gather", inputs)
        seconds = self._seconds(opts)
        if back is None:
            back = [
                list(zip(row, out, strict=True)) for row, out in zip(flats, outputs, strict=True)
            ]
        for row, one in zip(flats, mine, strict=True):
            self._same("all_gather", row[self._me], one)

        def job() -> None:
            for row, one, pairs in zip(flats, mine, back, strict=True):
                self.collectives.all_gather(row, one, seconds)
                for flat, tensor in pairs:
                    put_back(flat, tensor)

        return self._do("all_gather", job, outputs, opts)

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        root, seconds = opts.rootRank, self._seconds(opts)
        mine = self._flat("gather", inputs)
        rows = [self._parts("gather", row) for row in outputs] or [[]] * len(mine)

        def job() -> None:
            for row, one in zip(rows, mine, strict=True):
                self.collectives.gather(row, one, root, seconds)
            for row, out in zip(rows, outputs, strict=False):
                for flat, tensor in zip(row, out, strict=True):
                    put_back(flat, tensor)

        return self._do("gather", job, outputs, opts)

    # Spreading
    def broadcast(self, tensors: Tensors, opts: Any) -> dist.Work:
        root, seconds = opts.rootRank, self._seconds(opts)
        flats = self._flat("broadcast", tensors)

        def job() -> None:
            for flat, tensor in zip(flats, tensors, strict=True):
                self.collectives.broadcast(flat, root, seconds)
                put_back(flat, tensor)

        return self._do("broadcast", job, tensors, opts)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        root, seconds = opts.rootRank, self._seconds(opts)
        flats = self._flat("scatter", outputs)
        rows = [self._parts("scatter", row) for row in inputs] or [[]] * len(flats)

        def job() -> None:
            for row, flat, tensor in zip(rows, flats, outputs, strict=True):
                self.collectives.scatter(flat, row, root, seconds)
                put_back(flat, tensor)

        return self._do("scatter", job, outputs, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        out, into = self._parts("all_to_all", outputs), self._parts("all_to_all", inputs)
        return self._all_to_all(
            out, into, list(zip(out, outputs, strict=True)), opts, list(outputs)
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        whole: torch.Tensor,
        output_rows: Sequence[int],
        input_rows: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Rows of the first dimension, evenly or as the two lists say."""
        flat, given = self._flat("all_to_all", [output, whole])
        into = self._rows(given, whole, input_rows)
        out = self._rows(flat, output, output_rows)
        return self._all_to_all(out, into, [(flat, output)], opts, [output])

    def _all_to_all(
        self, out: Tensors, into: Tensors, back: Any, opts: Any, result: Tensors
    ) -> dist.Work:
        seconds = self._seconds(opts)
        self._same("all_to_all", out[self._me], into[self._me])

        def job() -> None:
            self.collectives.all_to_all(out, into, seconds)
            for flat, tensor in back:
                put_back(flat, tensor)

        return self._do("all_to_all", job, result, opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        seconds = self._seconds(opts)
        return self._do("barrier", lambda: self.collectives.barrier(seconds), [], opts)

    # Between two ranks
    def send(self, tensors: Tensors, peer: int, tag: int = 0) -> dist.Work:
        return self._messages.send(self._vector("send", tensors[0]), peer, tag, tensors)

    def recv(self, tensors: Tensors, peer: int, tag: int = 0) -> dist.Work:
        return self._messages.recv(arguments.place("recv", tensors[0]), peer, tag, tensors)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        raise CommError("recv from any rank is not there", hint="name the rank to receive from")

    # Names that older torch uses, or that C++ looks for
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _start_coalescing(self, device: Any = None) -> None:
        """Everything is in one queue already."""

    def _end_coalescing(self, device: Any = None) -> dist.Work:
        """Done when everything before it is."""
        return self._worker.do(lambda: None, [], "coalesced operations", True)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = self._messages.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        """Finishes what was begun, then leaves."""
        self._worker.close()
        self._messages.close()
        self._guard.leave()

    def abort(self) -> None:
        """Leaves at once; ranks that wait for this one get an error."""
        self._guard.stop(f"rank {self._names[self._me]} aborted the group")
        self.shutdown()

    # Arguments
    def _do(self, name: str, job: Callable[[], None], result: Any, opts: Any) -> dist.Work:
        return self._worker.do(job, result, name, getattr(opts, "asyncOp", True))

    def _seconds(self, opts: Any) -> float:
        """The timeout of one operation, if it has its own."""
        own = getattr(opts, "timeout", None)
        seconds = own.total_seconds() if own is not None else 0
        return seconds if seconds > 0 else self._timeout_s
