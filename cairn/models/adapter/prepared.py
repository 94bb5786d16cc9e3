"""Adapters of one shape, read fast: what depends on the model and the spec alone is prepared once.

    names, shapes, maps  ->  a place for each tensor in one flat buffer    once for a spec
    bytes of a file      ->  cast into the buffer                          for each adapter (`file_bytes`)

Building some hundred modules and copying some hundred tensors one by one takes far longer than moving their bytes.
What the plan does not cover (tensors of several types, ranks of one model, adapters of a lookup, rows in another order)
is read tensor by tensor (`folder.read_addends`).
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from cairn.models.adapter.attach import Addend, addends, map_names
from cairn.models.adapter.file_bytes import FileBytes, FileReader
from cairn.models.adapter.folder import PREFIX, check_finite, check_tensors, peft_name, row_order
from cairn.models.adapter.lora import LoRA
from cairn.models.adapter.spec import AdapterSpec
from cairn.models.build import Slot
from cairn.models.spec import ModelSpec
from cairn.models.transformer import Transformer


class BufferSpan(NamedTuple):
    """Location of a tensor in the flat buffer of an adapter."""

    begin: int
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        return self.begin + prod(self.shape)


class PreparedAdapter:
    """Blank adapters of a spec, and the places of their tensors."""

    def __init__(self, model: Transformer, spec: AdapterSpec, dtype: torch.dtype) -> None:
        self.dtype, self.device = dtype, model.embedding.weight.device
        build = model.build._replace(device="meta", dtype=dtype)
        names = map_names(model, model.spec)
        self.made = addends(model, model.spec, spec, build, names, alike=True)
        self.parameters: dict[str, dict[str, BufferSpan]] = {}  # by path, then by name
        self.places: dict[str, BufferSpan] = {}  # by the names of a file
        self.size, self.reorders = 0, False
        alike: dict[int, tuple[list[tuple[str, Tensor]], list[Slot]]] = {}  # layers repeat
        for path, one in self.made.items():
            blank = id(one.lora._parameters)
            if blank not in alike:
                alike[blank] = list(one.lora.named_parameters()), list(one.lora.slots())
            self._place(path, *alike[blank], model.spec)

    def _place(
        self, path: str, tensors: list[tuple[str, Tensor]], slots: list[Slot], spec: ModelSpec
    ) -> None:
        """The tensors of one map, behind those of the maps before it."""
        spans = self.parameters[path] = {}
        for name, blank in tensors:
            spans[name] = BufferSpan(self.size, tuple(blank.shape), blank.stride())
            self.size = spans[name].end
        for slot in slots:
            span = spans[slot.parameter]
            first = cast(slice, slot.index[0]).start if slot.index else 0
            ours = f"{path}.adapter.{slot.name}"
            self.reorders |= bool(row_order(spec, ours))
            begin = span.begin + first * prod(span.shape[1:])
            self.places[PREFIX + peft_name(spec, ours)] = BufferSpan(begin, tuple(slot.shape))

    @property
    def covers(self) -> bool:
        """Return whether adapters of this spec can be read as one flat buffer."""
        loras = [one.lora for one in self.made.values()]
        return not self.reorders and all(
            isinstance(one, LoRA) and one.shards.size == 1 for one in loras
        )

    def made_of(
        self, file: FileBytes, reader: FileReader, folder: Path
    ) -> tuple[dict[str, Addend], Tensor]:
        """The adapter of a file, and the buffer that its parameters are parts of. `folder`: for errors."""
        check_tensors(
            {name: one.shape for name, one in file.stored.items()},
            {name: place.shape for name, place in self.places.items()},
            folder,
        )
        if self.device.type != "cuda":
            flat = self._cast(file)
            check_finite([flat], folder)
            return self._views(flat), flat
        with torch.cuda.stream(reader.stream):
            flat = self._cast(file)
            check_finite([flat], folder)
        reader.stream.synchronize()
        # Freed one day, the memory may be written anew only behind what runs on the model's stream.
        flat.record_stream(torch.cuda.default_stream(self.device))
        return self._views(flat), flat

    def _cast(self, file: FileBytes) -> Tensor:
        raw, wide = file.raw, file.raw.element_size()
        flat = torch.empty(self.size, dtype=self.dtype, device=raw.device)
        # Some hundred small views: each in the one call that makes it fastest.
        offsets = (file.stored[name].data_offsets for name in self.places)
        torch._foreach_copy_(
            [_line(flat, place.begin, place.end) for place in self.places.values()],
            [_line(raw, begin // wide, end // wide) for begin, end in offsets],
        )
        return flat

    def _views(self, flat: Tensor) -> dict[str, Addend]:
        return {
            path: Addend(one.home, one.lora.with_parameters(views_of(flat, self.parameters[path])))
            for path, one in self.made.items()
            if isinstance(one.lora, LoRA)
        }


def views_of(flat: Tensor, spans: Mapping[str, BufferSpan]) -> dict[str, Tensor]:
    return {name: flat.as_strided(s.shape, s.stride, s.begin) for name, s in spans.items()}


def _line(flat: Tensor, begin: int, end: int) -> Tensor:
    return flat.as_strided((end - begin,), (1,), begin)
