"""Writes a quantised model as a GGUF file that llama.cpp and `cairn` read: Q8_0 or Q4_0 blocks of 32 values.

Metadata and tokenizer are those of the GGUF file that the model came from; its matrices are the planes, the embedding
and the head are Q8_0, and everything else is float32. A model that came from elsewhere has no such file.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cairn.core.errors import ConfigError, UnsupportedModel
from cairn.models.export import complete_folder, single_tensors
from cairn.models.gguf.file import GGUFFile
from cairn.models.gguf.keys import ROPE_FACTORS
from cairn.models.gguf.tensor_names import GGUFSource
from cairn.models.gguf.value_transforms import redo
from cairn.models.quantized.planes import Planes
from cairn.models.quantized.rounding import SCHEMES, rounded
from cairn.models.quantized.stored_planes import stored_planes
from cairn.models.quantized.write import QuantizedModel

BLOCK = 32
ROUTER = re.compile(
    r"(gate|router)\.weight$"
)  # narrow, and what it chooses hangs on small differences
KEPT = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture")
FILE_TYPES = {"q4_0": 2, "q8_0": 7}  # of general.file_type: "mostly" this one


def write_gguf(quantized: QuantizedModel, folder: Path, like: Path, scheme: str) -> Path:
    """A new folder with one file; `like`: the GGUF file whose metadata it takes over."""
    name = f"model.{scheme.upper()}.gguf"
    with complete_folder(folder) as unfinished:
        _write_file(quantized, unfinished / name, like, scheme)
    return folder / name


def check_source(like: Path | None, family: str) -> Path:
    """The GGUF file that a model came from."""
    if family == "gpt2":
        raise UnsupportedModel(
            "gpt2 models are not written as GGUF",
            hint="use a model of another family, or quantise as it is served: --weights",
        )
    if like is None:
        raise ConfigError(
            "a GGUF file takes its metadata from the GGUF file of the model, and this model is none",
            hint="begin with a .gguf file, or use --scheme w8a8 or w4a16",
        )
    return like


def _write_file(quantized: QuantizedModel, path: Path, like: Path, scheme: str) -> None:
    from gguf import GGUFReader, GGUFWriter

    reader = GGUFReader(like)
    writer = GGUFWriter(path, str(_contents(reader, "general.architecture")))
    _copy_metadata(reader, writer, scheme)
    with GGUFFile(like) as file:
        places = {name: file.source(name) for name in file.names()}
        _refuse_joined(places, like)
        stacks: dict[str, list[tuple[np.ndarray, Any]]] = {}
        for name, data, kind in _encoded(quantized, places, scheme):
            place = places[name]
            if place.stored.shape != place.stored_shape:  # one expert of a stack
                parts = stacks.setdefault(place.stored.name, [])
                parts.append((data, kind))
                if len(parts) == place.stored.shape[0]:
                    writer.add_tensor(
                        place.stored.name, np.stack([one for one, _ in parts]), raw_dtype=kind
                    )
            else:
                writer.add_tensor(place.stored.name, data, raw_dtype=kind)
    _copy_rope_tensors(reader, writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _refuse_joined(places: dict[str, GGUFSource], like: Path) -> None:
    for name, place in places.items():
        if place.joined is not None:
            raise ConfigError(
                f"{like} has {name} in two tensors, which would be rounded apart",
                hint="use --scheme w8a8 or w4a16",
            )


def _contents(reader: Any, name: str) -> Any:
    return reader.fields[name].contents()


def _copy_metadata(reader: Any, writer: Any, scheme: str) -> None:
    from gguf import GGUFValueType

    for name, field in reader.fields.items():
        if name in KEPT or name == "general.file_type":
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_file_type(FILE_TYPES[scheme])


def _copy_rope_tensors(reader: Any, writer: Any) -> None:
    """Copy the RoPE frequency factors, which a file stores as tensors although they are not weights."""
    for tensor in reader.tensors:
        if tensor.name in ROPE_FACTORS:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)


def _encoded(quantized: QuantizedModel, places: dict[str, GGUFSource], scheme: str) -> Any:
    """Name, bytes or values, and GGUF type of each tensor."""
    from gguf import GGMLQuantizationType as Type

    planes = stored_planes(quantized.model, quantized.planes)
    types = {"int8": Type.Q8_0, "int4": Type.Q4_0}
    for name, tensor in single_tensors(quantized.model):
        if name not in places:
            continue  # a tied head
        place = places[name]
        made = planes.get(name)
        if (
            made is None
            and tensor.ndim == 2
            and tensor.shape[1] % BLOCK == 0
            and name.endswith(".weight")  # no bias of a router, whose steps are small
            and not ROUTER.search(name)
        ):
            made = rounded(tensor.float(), SCHEMES["q8_0"], torch.float16)
        if made is None:
            yield name, redo(place.change, tensor.float()).numpy(), Type.F32
        else:
            yield name, blocks(made, place), types[made.kind]


def blocks(planes: Planes, place: GGUFSource | None = None) -> np.ndarray:
    """Rows of Q8_0 or Q4_0 blocks as bytes: a scale in float16, then 32 values."""
    levels, scales = planes.levels_NK.cpu(), planes.scales.cpu()
    if place is not None:
        levels, scales = redo(place.change, levels), redo(place.change, scales)
    rows, columns = levels.shape
    grouped = levels.view(rows, columns // BLOCK, BLOCK)
    if planes.kind == "int4":
        values = grouped[..., :16] | grouped[..., 16:] << 4
    else:
        values = grouped.view(torch.uint8)
    head = scales.half()[..., None].view(torch.uint8)
    return torch.cat((head, values), -1).flatten(1).contiguous().numpy()
