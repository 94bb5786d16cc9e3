"""An adapter on disk: the folder that PEFT writes and reads.

    adapter_config.json           what it is                                         `peft_config`
    adapter_model.safetensors     base_model.model.<map>.lora_A.weight [r, in], .lora_B.weight [out, r]
                                  .lora_magnitude_vector [out] (DoRA);  .lora_embedding_A/B for a lookup

Reading checks every tensor against the model before any of them is used; a name too many or too few is refused. What an
adapter adds to q and k has its rows in the order of the checkpoint there, and in the model's order here.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cairn.core.errors import WeightsError
from cairn.models.adapter.attach import Addend, addends, install, map_names
from cairn.models.adapter.lora import EmbeddingLoRA, LoRA
from cairn.models.adapter.peft_config import FILE, read_config, to_peft
from cairn.models.adapter.spec import AdapterSpec
from cairn.models.build import Slot
from cairn.models.checkpoint_names import rotary_order, source
from cairn.models.safetensors_file import write_tensors
from cairn.models.spec import ModelSpec
from cairn.models.transformer import Transformer

PREFIX = "base_model.model."
WEIGHTS = "adapter_model.safetensors"
KINDS = {"a": "lora_A.weight", "b": "lora_B.weight", "m": "lora_magnitude_vector"}
LOOKUP_KINDS = {"a": "lora_embedding_A", "b": "lora_embedding_B"}
ROTATED = re.compile(r"attention\.qkv\.adapter\.[qk]\.[bm]$")


def read_adapter(model: Transformer, folder: Path, dtype: torch.dtype | None = None) -> AdapterSpec:
    """Attaches the adapter in a folder to a whole model. `dtype`: of its weights; by default the model's."""
    spec, adapted = read_addends(model, folder, dtype)
    install(adapted.values())
    return spec


def read_addends(
    model: Transformer, folder: Path, dtype: torch.dtype | None = None
) -> tuple[AdapterSpec, dict[str, Addend]]:
    """The adapter in a folder, checked against this model and loaded, but not added to its products yet."""
    spec, _ = read_config(folder)
    stored = read_tensors(folder)
    device = str(model.embedding.weight.device)
    blank = model.build._replace(device=device, dtype=dtype or model.build.dtype)
    adapted = addends(model, model.spec, spec, blank, map_names(model, model.spec))
    needed = {
        PREFIX + peft_name(model.spec, name): (one.lora, slot, row_order(model.spec, name))
        for path, one in adapted.items()
        for slot in one.lora.slots()
        for name in (f"{path}.adapter.{slot.name}",)
    }
    check_tensors(
        {name: tuple(tensor.shape) for name, tensor in stored.items()},
        {name: slot.shape for name, (_, slot, _) in needed.items()},
        folder,
    )
    with torch.no_grad():
        for name, (lora, slot, order) in needed.items():
            value = slot.share(_reordered(stored[name], order))
            lora.get_parameter(slot.parameter)[slot.index].copy_(value)
    check_finite((p for one in adapted.values() for p in one.lora.parameters()), folder)
    return spec, adapted


def write_adapter(model: Transformer, spec: AdapterSpec, folder: Path, base: str = "") -> None:
    """The adapter of a model as a new folder, in float32; it appears when it is complete."""
    tensors = {}
    for slot in adapter_slots(model):
        order = row_order(model.spec, slot.name)
        back = sorted(range(len(order)), key=order.__getitem__)
        value = _reordered(model.get_parameter(slot.parameter).detach()[slot.index], back)
        tensors[PREFIX + peft_name(model.spec, slot.name)] = value.float().cpu().contiguous()
    transposed = source(model.spec.family, "layers.0.attention.out.weight").transposed
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    fields = to_peft(spec, base, transposed)
    (unfinished / FILE).write_text(json.dumps(fields, indent=2) + "\n")
    write_tensors(tensors, unfinished / WEIGHTS)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)


def adapter_slots(model: nn.Module) -> list[Slot]:
    """The tensors of all adapters in a model."""
    return list(_slots(dict(_homes(model))))


def read_tensors(folder: Path) -> dict[str, Tensor]:
    file = folder / WEIGHTS
    check_file(folder)
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise unreadable(file, error) from None


def check_file(folder: Path) -> None:
    if not (folder / WEIGHTS).is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        raise WeightsError(
            f"no {WEIGHTS} in {folder}",
            hint="pickled weights are not read: save them again with a newer PEFT"
            if pickled
            else "the folder is incomplete",
        )


def check_finite(tensors: Iterable[Tensor], folder: Path) -> None:
    """Refuses numbers that are infinite or NaN: keys made of them would spoil pages that other requests get later."""
    # The extremes of a tensor with a NaN are NaN; to compare each number would take memory for each.
    extremes = (torch.stack(torch.aminmax(tensor)) for tensor in tensors)
    if not all(bool(pair_2.isfinite().all()) for pair_2 in extremes):
        raise WeightsError(
            f"{folder} has numbers that are not finite in {WEIGHTS}",
            hint="its training diverged, or they are too large for the model's number type",
        )


def unreadable(file: Path, error: Exception) -> WeightsError:
    return WeightsError(
        f"{file} cannot be read: {' '.join(str(error).split())}",
        hint="the file may be truncated: compare its size with the original",
    )


def peft_name(spec: ModelSpec, slot: str) -> str:
    """layers.0.attention.qkv.adapter.q.a -> model.layers.0.self_attn.q_proj.lora_A.weight"""
    home, _, inner = slot.partition(".adapter.")
    part, _, kind = inner.rpartition(".")
    path = source(spec.family, f"{home}.{part}.weight" if part else f"{home}.weight").tensor
    kinds = LOOKUP_KINDS if home == "embedding" else KINDS
    return f"{path.removesuffix('.weight')}.{kinds[kind]}"


def row_order(spec: ModelSpec, slot: str) -> tuple[int, ...]:
    """Row permutation of a head between file and model for adapters of q and k; () is the identity."""
    return rotary_order(spec) if ROTATED.search(slot) else ()


def _reordered(rows: Tensor, order: Sequence[int]) -> Tensor:
    """The rows of every head in another order."""
    return rows.unflatten(0, (-1, len(order)))[:, list(order)].flatten(0, 1) if order else rows


def _homes(model: nn.Module) -> Iterator[tuple[str, LoRA | EmbeddingLoRA]]:
    for path, module in model.named_modules():
        if isinstance(module, LoRA | EmbeddingLoRA):
            yield path, module


def _slots(homes: dict[str, LoRA | EmbeddingLoRA]) -> Iterator[Slot]:
    for path, one in homes.items():
        yield from (slot.under(path) for slot in one.slots())


def check_tensors(
    stored: Mapping[str, tuple[int, ...]], needed: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    """Refuses a file whose tensors, by name and shape, are not those that the model needs."""
    if missing := sorted(needed.keys() - stored.keys()):
        raise WeightsError(
            f"{folder} lacks {len(missing)} tensors of its own adapter_config.json, such as {missing[0]}",
            hint="the adapter was made for another base model, or the folder is incomplete",
        )
    if extra := sorted(stored.keys() - needed.keys()):
        raise WeightsError(
            f"{folder} has {len(extra)} tensors that fit no map of this model, such as {extra[0]}",
            hint="the adapter was made for another base model",
        )
    for name, shape in needed.items():
        if stored[name] != shape:
            raise WeightsError(
                f"{folder}: {name} has shape {list(stored[name])}, this model wants {list(shape)}",
                hint="the adapter was made for another base model",
            )
