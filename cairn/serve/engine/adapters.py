"""Adapters of a model that serves: each request is computed with its own, in one step with all others.

    load a folder -> addends of the maps, beside the weights, which stay as they are
    step          -> rows of each adapter -> the addends hang on the maps for as long as the step takes

A step without adapters computes what an engine without any computes, from the same graphs and records. In one with
adapters every covered map adds B A x of each adapter to the rows of its requests: by torch, one adapter after another,
or on a GPU by kernels over slots (`engine.adapter_slots`), which graphs hold. An adapter that is unloaded goes when the
last of its requests has ended.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch
from torch import Tensor

from cairn.core.errors import CairnError, ConfigError, RequestError, UnsupportedModel, WeightsError
from cairn.models.adapter.attach import Addend as AdapterAddend
from cairn.models.adapter.file_bytes import FileReader
from cairn.models.adapter.folder import WEIGHTS, check_file, read_addends
from cairn.models.adapter.lora import LoRA
from cairn.models.adapter.peft_config import read_config
from cairn.models.adapter.prepared import PreparedAdapter
from cairn.models.adapter.spec import AdapterSpec
from cairn.models.lean import Lean
from cairn.models.linear.maps import Addend, ColumnParallelLinear, Linear, RowParallelLinear
from cairn.models.transformer import Transformer
from cairn.serve.engine.adapter_residency import HostCopy, Residency
from cairn.serve.engine.request import Request
from cairn.serve.engine.step import Chunk

if TYPE_CHECKING:
    from cairn.serve.engine.adapter_slots import AdapterSlots

USUAL_RANK = 16  # of adapters on all maps: as much memory is taken before the first one comes
PREPARED = 16  # specs whose shapes are kept, so that the next adapter of each is read fast
VARIES = "with batch_invariant, an adapter's products would depend on who else is in the batch"


class LoadedAdapter(NamedTuple):
    rank: int
    addends: dict[Linear, LoRA]
    flat: Tensor | None = None  # what all parameters are parts of; None: they lie anywhere

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for lora in self.addends.values() for p in lora.parameters())


class Segment(NamedTuple):
    """The rows of a step that belong to one adapter."""

    adapter: int
    rows_R: Tensor | None  # None: all of them


class Adapters:
    """Adapters of a runner by number. Numbers are never reused."""

    def __init__(self, model: Transformer, obstacle: str | None = None) -> None:
        """`obstacle`: why this runner can have none."""
        self.model, self.obstacle = model, obstacle
        self.loaded: dict[int, LoadedAdapter] = {}
        self.retired: set[int] = set()  # unloaded, and still used by a request
        self.active = False  # the step that runs has adapters
        self.slots: AdapterSlots | None = None  # on a GPU
        self.in_slots = False  # all adapters of the step that runs are in slots
        self._lean: Lean | None = None
        self._residency = Residency()
        self._hosts: dict[int, HostCopy] = {}  # of all adapters, where not all stay on the device
        self._prepared: dict[bytes, PreparedAdapter] = {}  # by spec
        self._reading = threading.Lock()  # a reader has one set of pinned memory

    @cached_property
    def _reader(self) -> FileReader:
        """A device that only keeps time has no model, and reads no adapter."""
        return FileReader(self.model.embedding.weight.device)

    def keep(self, most: int) -> None:
        """Limit the number of adapters on the device."""
        self._residency = Residency(most)

    def read(self, folder: str) -> LoadedAdapter:
        """Checked against the model, and on its device. Changes nothing, so any thread may call it."""
        if self.obstacle is not None:
            raise ConfigError(f"no adapter can be served: {self.obstacle}")
        with self._reading:
            spec, by_path, flat = self._read(Path(folder))
        addends: dict[Linear, LoRA] = {}
        for path, (home, lora) in by_path.items():
            if not isinstance(lora, LoRA) or not isinstance(
                home, ColumnParallelLinear | RowParallelLinear
            ):
                raise UnsupportedModel(
                    f"the adapter in {folder} covers {path}, which is served without adapters",
                    hint="merge it (cairn adapter merge), and serve the merged model",
                )
            if lora.dora and any(weight.is_meta for weight in home.matrices()):
                raise WeightsError(
                    f"the DoRA adapter in {folder} needs the lengths of rows, and the weights are packed",
                    hint="serve with --weights float, or merge it (cairn adapter merge)",
                )
            if flat is None or lora.dora:
                lora.settle()
            addends[home] = lora
        return LoadedAdapter(spec.rank, addends, flat)

    def warm_up(self) -> None:
        """Prepare the work that the first adapter would otherwise wait for."""
        if self.obstacle is None:
            maps = [
                part
                for part in self.model.modules()
                if isinstance(part, ColumnParallelLinear | RowParallelLinear)
            ]
            shapes = [
                (part.shape_NK(), len(part.parts) if isinstance(part, ColumnParallelLinear) else 1)
                for part in maps
            ]
            numbers = USUAL_RANK * sum(rows + parts * columns for (rows, columns), parts in shapes)
            dtype = self.model.embedding.weight.dtype
            self._reader.warm_up(dtype, numbers)
            # The names of all maps are looked up, and kept; an adapter's own spec may be another one.
            with suppress(CairnError):  # not every model can have one on all maps
                PreparedAdapter(self.model, AdapterSpec(rank=USUAL_RANK), dtype)

    def _read(self, folder: Path) -> tuple[AdapterSpec, dict[str, AdapterAddend], Tensor | None]:
        spec, _ = read_config(folder)
        check_file(folder)
        if self.model.build.shards.size == 1:
            # One after the other: threads that read would wait for the one that works shapes out in Python.
            prepared = self._prepare(spec)
            file = self._reader.read(folder / WEIGHTS) if prepared.covers else None
            if file is not None:
                return spec, *prepared.made_of(file, self._reader, folder)
        return *read_addends(self.model, folder, self.model.embedding.weight.dtype), None

    def _prepare(self, spec: AdapterSpec) -> PreparedAdapter:
        key = msgspec.json.encode(spec)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = PreparedAdapter(self.model, spec, self.model.embedding.weight.dtype)
            if len(self._prepared) >= PREPARED:
                self._prepared.clear()
            self._prepared[key] = prepared
        return prepared

    def add(self, number: int, adapter: LoadedAdapter) -> None:
        self.loaded[number] = adapter
        if self._residency.most:
            self._hosts[number] = HostCopy(adapter.addends.values(), adapter.flat)
            self.loaded[number] = adapter._replace(flat=None)
            self._hosts[number].put_out()
        elif self.slots is not None:
            self.slots.put(number, adapter.addends)

    def _bring(self, numbers: Iterable[int]) -> None:
        """The adapters of the step that comes lie on the device."""
        if not self._residency.most:
            return
        moves = self._residency.use(numbers)
        for number in moves.put_out:
            self._drop(number)
        for number in moves.bring:
            adapter = self.loaded[number]
            self._hosts[number].bring(self.model.embedding.weight.device)
            if self.slots is not None:
                self.slots.put(number, adapter.addends)

    def _drop(self, number: int) -> None:
        """Off the device."""
        if number in self._hosts:
            self._hosts[number].put_out()
        if self.slots is not None:
            self.slots.drop(number)

    def check(self, request: Request) -> None:
        number = request.adapter
        if number and (number not in self.loaded or number in self.retired):
            raise RequestError("the adapter of this request has been unloaded")

    def retire(self, number: int, requests: Iterable[Request]) -> None:
        """Take no new request for it; it goes with the last one that it has."""
        if number in self.loaded:
            self.retired.add(number)
            self.sweep(requests)

    def sweep(self, requests: Iterable[Request]) -> None:
        """Drop retired adapters that no request uses."""
        used = {request.adapter for request in requests}
        for number in self.retired - used:
            self.retired.discard(number)
            self._drop(number)
            self._residency.forget(number)
            self._hosts.pop(number, None)
            del self.loaded[number]

    @contextmanager
    def routed(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Inside, the maps add what each row's adapter adds."""
        numbers = {chunk.request.adapter for chunk in chunks} - {0}
        if not numbers:
            yield
            return
        self._bring(numbers)
        self.in_slots = self.slots is not None and self.slots.hold(numbers)
        added: Mapping[Linear, Addend]
        added = (
            self.slots.addends
            if self.slots is not None and self.in_slots
            else self._addends(chunks)
        )
        for home, addend in added.items():
            home.addend = addend
        self.active = True
        try:
            yield
        finally:
            self.active = self.in_slots = False
            for home in added:
                home.addend = None

    def _addends(self, chunks: Sequence[Chunk]) -> dict[Linear, Addend]:
        """Addends of this step's rows, computed with torch."""
        by_map: dict[Linear, list[tuple[LoRA, Tensor | None]]] = {}
        for number, rows_R in segments_of(chunks, self.model.embedding.weight.device):
            for home, lora in self.loaded[number].addends.items():
                by_map.setdefault(home, []).append((lora, rows_R))
        return {home: addend_of(parts) for home, parts in by_map.items()}

    def lean(self) -> Lean:
        """The lean form for steps with adapters: its norms keep their weights, which addends need."""
        if self._lean is None:
            maps = [
                part
                for part in self.model.modules()
                if isinstance(part, ColumnParallelLinear | RowParallelLinear)
            ]
            before = [part.addend for part in maps]
            for part in maps:
                part.addend = part.addend or _unused
            self._lean = Lean(self.model)
            for part, addend in zip(maps, before, strict=True):
                part.addend = addend
        return self._lean

    def drop_forms(self) -> None:
        """Give back what was made of the weights; `lean` makes it again."""
        self._lean = None

    def forget_forms(self) -> None:
        """The weights have changed."""
        self.drop_forms()
        for number, adapter in self.loaded.items():
            self._bring([number])
            for lora in adapter.addends.values():
                lora.settle()


def segments_of(chunks: Sequence[Chunk], device: torch.device | str) -> list[Segment]:
    """The rows of each adapter in a step; nothing for those of the model itself."""
    numbers = {chunk.request.adapter for chunk in chunks}
    if len(numbers) == 1:
        (number,) = numbers
        return [Segment(number, None)] if number else []
    rows: dict[int, list[int]] = {}
    at = 0
    for chunk in chunks:
        if chunk.request.adapter:
            rows.setdefault(chunk.request.adapter, []).extend(range(at, at + chunk.count))
        at += chunk.count
    return [Segment(n, torch.tensor(rows[n], device=device)) for n in sorted(rows)]


def addend_of(parts: Sequence[tuple[LoRA, Tensor | None]]) -> Callable[[Tensor], Tensor]:
    """Combined addend of several adapters to one linear map, each for its own rows."""
    if len(parts) == 1 and parts[0][1] is None:
        return parts[0][0].forward

    def addend(x_MK: Tensor) -> Tensor:
        out_MN: Tensor | None = None
        for lora, rows_R in parts:
            added_RN = lora.forward(x_MK[rows_R])
            if out_MN is None:
                out_MN = added_RN.new_zeros(len(x_MK), added_RN.shape[1])
            out_MN[rows_R] = added_RN
        assert out_MN is not None
        return out_MN

    return addend


def _unused(x_MK: Tensor) -> Tensor:
    raise RuntimeError("this stands for an addend while a form is made")
