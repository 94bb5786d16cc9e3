"""Adapters of one shape, read fast: what depends on the model and the spec alone is prepared once.

    names, shapes, maps  ->  a place for each tensor in one flat buffer    once for a spec
    file -> pinned pieces -> the device -> cast into the buffer            for each adapter, on a stream of its own

Building some hundred modules and copying some hundred tensors one by one takes far longer than moving their bytes.
Reading launches nothing on the stream where a model runs, so nobody waits for it. What the plan does not cover (tensors
of several types, ranks of one model, adapters of a lookup) is read tensor by tensor (`folder.read_addends`).
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cairn.models.adapter.attach import Addend, addends, map_names
from cairn.models.adapter.folder import PREFIX, WEIGHTS, check_tensors, peft_name, unreadable
from cairn.models.adapter.lora import LoRA
from cairn.models.adapter.spec import AdapterSpec
from cairn.models.transformer import Transformer

TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PIECE = 8 << 20  # bytes of the file that a thread moves at a time
READERS = 4
LENGTH = 8  # bytes in which a file says how long its header is


class Span(NamedTuple):
    """Where a tensor lies in the flat buffer of an adapter."""

    begin: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.begin + prod(self.shape)


class Stored(msgspec.Struct, frozen=True):
    """What a file of safetensors says about one tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class PreparedAdapter:
    """Blank adapters of a spec, and the places of their tensors."""

    def __init__(self, model: Transformer, spec: AdapterSpec, dtype: torch.dtype) -> None:
        self.dtype, self.device = dtype, model.embedding.weight.device
        blank = model.build._replace(device="meta", dtype=dtype)
        self.made = addends(model, model.spec, spec, blank, map_names(model, model.spec))
        self.parameters: dict[str, dict[str, Span]] = {}  # by path, then by name
        self.places: dict[str, Span] = {}  # by the names of a file
        self.size = 0
        self._stream: torch.cuda.Stream | None = None
        for path, one in self.made.items():
            spans = self.parameters[path] = {}
            for name, parameter in one.lora.named_parameters():
                spans[name] = Span(self.size, tuple(parameter.shape))
                self.size = spans[name].end
            for slot in one.lora.slots():
                span = spans[slot.parameter]
                first = cast(slice, slot.index[0]).start if slot.index else 0
                begin = span.begin + first * prod(span.shape[1:])
                theirs = PREFIX + peft_name(model.spec, f"{path}.adapter.{slot.name}")
                self.places[theirs] = Span(begin, tuple(slot.shape))

    @property
    def covers(self) -> bool:
        """Whether adapters of this spec can be read this way."""
        loras = [one.lora for one in self.made.values()]
        return all(isinstance(one, LoRA) and one.shards.size == 1 for one in loras)

    def read(self, folder: Path) -> tuple[dict[str, Addend], Tensor] | None:
        """The adapter in a folder, and the buffer that its parameters are parts of. None: not a file of one type."""
        start, stored = read_header(folder / WEIGHTS)
        if len(types := {one.dtype for one in stored.values()}) != 1 or not types <= TYPES.keys():
            return None
        check_tensors(
            {name: one.shape for name, one in stored.items()},
            {name: place.shape for name, place in self.places.items()},
            folder,
        )
        size = max(one.data_offsets[1] for one in stored.values())
        flat = self._filled(folder / WEIGHTS, start, size, TYPES[types.pop()], stored)
        return self._views(flat), flat

    def _filled(
        self, file: Path, start: int, size: int, dtype: torch.dtype, stored: Mapping[str, Stored]
    ) -> Tensor:
        if self.device.type != "cuda":
            raw = torch.empty(size, dtype=torch.uint8)
            with file.open("rb") as opened:
                _read_into(raw, opened.fileno(), start, file)
            return self._cast(raw.view(dtype), stored)
        stream = self._stream = self._stream or torch.cuda.Stream(
            self.device
        )  # memory is kept by stream
        with torch.cuda.stream(stream):
            raw = torch.empty(size, dtype=torch.uint8, device=self.device)
            _upload(file, start, raw, stream)
            flat = self._cast(raw.view(dtype), stored)
        stream.synchronize()
        # Freed one day, the memory may be written anew only behind what runs on the model's stream.
        flat.record_stream(torch.cuda.default_stream(self.device))
        return flat

    def _cast(self, raw: Tensor, stored: Mapping[str, Stored]) -> Tensor:
        flat, wide = torch.empty(self.size, dtype=self.dtype, device=raw.device), raw.element_size()
        into = [flat[place.begin : place.end] for place in self.places.values()]
        found = (stored[name].data_offsets for name in self.places)
        torch._foreach_copy_(into, [raw[begin // wide : end // wide] for begin, end in found])
        return flat

    def _views(self, flat: Tensor) -> dict[str, Addend]:
        return {
            path: Addend(one.home, one.lora.with_parameters(views_of(flat, self.parameters[path])))
            for path, one in self.made.items()
            if isinstance(one.lora, LoRA)
        }


def views_of(flat: Tensor, spans: Mapping[str, Span]) -> dict[str, Tensor]:
    return {name: flat[span.begin : span.end].view(span.shape) for name, span in spans.items()}


def read_header(file: Path) -> tuple[int, dict[str, Stored]]:
    """Where the numbers begin, and which there are; the file is checked by the library that defines it."""
    try:
        with safe_open(file, framework="pt"), file.open("rb") as opened:
            length = int.from_bytes(opened.read(LENGTH), "little")
            fields = msgspec.json.decode(opened.read(length))
    except (SafetensorError, OSError) as error:
        raise unreadable(file, error) from None
    fields.pop("__metadata__", None)
    return LENGTH + length, msgspec.convert(fields, dict[str, Stored])


def _upload(file: Path, start: int, there: Tensor, stream: torch.cuda.Stream) -> None:
    """Reads a file behind `start` by several threads; each copies its pieces from memory that the device can read."""

    def move(first: int) -> None:
        piece = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
        for begin in range(first * PIECE, len(there), READERS * PIECE):
            count = min(PIECE, len(there) - begin)
            _read_into(piece[:count], opened.fileno(), start + begin, file)
            with torch.cuda.stream(stream):
                there[begin : begin + count].copy_(piece[:count], non_blocking=True)
                stream.record_event().synchronize()

    with file.open("rb") as opened, ThreadPoolExecutor(READERS) as pool:
        list(pool.map(move, range(READERS)))


def _read_into(there: Tensor, descriptor: int, start: int, file: Path) -> None:
    buffer, done = memoryview(cast(Any, there.numpy())), 0
    while done < len(there):  # one call reads 2 GiB at most
        read = os.preadv(descriptor, [buffer[done:]], start + done)
        if not read:
            raise unreadable(file, OSError("it has become shorter"))
        done += read
