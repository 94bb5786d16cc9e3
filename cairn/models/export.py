"""Writes a model as a checkpoint that `transformers` and every other tool of the field can load.

Weights go back under the names they came from, bit by bit as they are in memory: fused projections are taken
apart, transposed matrices turned back. The config is made from the spec, so a model that was trained here from a
preset is exported just as one that was loaded. Writing is all or nothing: the folder appears when it is complete.
"""

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cairn.core.errors import ConfigError, UnsupportedModel
from cairn.models.checkpoint_names import sources
from cairn.models.families import ARCHITECTURES, from_hf
from cairn.models.family_config import config_of
from cairn.models.safetensors_file import write_tensors
from cairn.models.spec import ModelSpec
from cairn.models.stacked_experts import STACKED_FAMILIES, stack_experts
from cairn.models.transformer import Transformer

SHARD_BYTES = 5 * 1000**3  # the size at which the hub's own tools split
# Families whose name alone stands for a model that sees as well.
TEXT_ONLY = {
    "gemma3": "gemma3_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)


def export(
    model: Transformer,
    folder: Path,
    *,
    like: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    stream: Iterator[tuple[str, Tensor]] | None = None,
    dtype: torch.dtype | None = None,
    more: dict[str, Any] | None = None,
) -> None:
    """Write config and weights to a new folder; the tokenizer's files are copied from `like`.

    `stream`: other tensors than the model's own, of type `dtype`; `more`: fields of config.json beside the model's.
    """
    if model.build.shards.size != 1:
        raise ConfigError(
            f"a model split over {model.build.shards.size} ranks cannot be exported from one",
            hint="gather its weights first",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty", hint="choose another folder")
    config = to_hf(model.spec, dtype or model.build.dtype) | (more or {})
    with complete_folder(folder) as unfinished:
        (unfinished / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _write_weights(tensors(model) if stream is None else stream, unfinished, shard_bytes)
        for name in TOKENIZER_FILES:
            if like is not None and (like / name).is_file():
                shutil.copyfile(like / name, unfinished / name)


@contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """A place beside `folder` to write to, which becomes `folder` at the end; after a failure nothing is left."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if folder.exists():
            folder.rmdir()
        unfinished.rename(folder)
    except BaseException:  # also Ctrl-C; on a full disk the half of a model would keep it full
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its name in a checkpoint, contiguous, in checkpoint order."""
    by_name = single_tensors(model)
    return stack_experts(by_name, model.spec) if model.spec.family in STACKED_FAMILIES else by_name


def single_tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    """The same, but each expert has tensors of its own in every family."""
    whole: dict[str, list[Tensor]] = {}
    slots = list(model.slots())
    where = sources(model.spec, {slot.name: slot.shape for slot in slots})
    for slot in slots:
        place = where[slot.name]
        value = model.get_parameter(slot.parameter).detach()[slot.index]
        if place.order:
            heads = value.unflatten(0, (-1, len(place.order)))
            value = heads[:, torch.tensor(place.order).argsort()].flatten(0, 1)
        pieces = whole.setdefault(place.tensor, [])
        pieces.append(value)
        if len(pieces) == place.parts:  # slots come in the order in which the parts are stored
            joined = _joined(whole.pop(place.tensor), place.groups)
            joined = joined[None] if place.leading else joined
            yield place.tensor, (joined.t() if place.transposed else joined).contiguous()


def _joined(parts: list[Tensor], groups: int) -> Tensor:
    """Parts of one tensor, one behind the other, or alternating in so many groups."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def _write_weights(stream: Iterator[tuple[str, Tensor]], folder: Path, shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in stream:
        if size and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        write_tensors(shards[0], folder / "model.safetensors")
        return
    home = {}
    for i, shard in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(shard, folder / file)
        home |= dict.fromkeys(shard, file)
    total = sum(t.nbytes for shard in shards for t in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": home}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


# -- config -------------------------------------------------------------------------------------


def to_hf(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The config.json of a spec: what `families.from_hf` reads back as the same spec."""
    if spec.family not in ARCHITECTURES:
        raise UnsupportedModel(
            f"no checkpoint format is known for the family {spec.family!r}",
            hint=f"known families: {', '.join(ARCHITECTURES)}",
        )
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[spec.family]],
        "model_type": TEXT_ONLY.get(spec.family, spec.family),
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": spec.vocab,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": spec.bos_id,
        "pad_token_id": None,  # absent, some families have one outside of a small vocabulary
        "eos_token_id": list(spec.eos_ids)
        if len(spec.eos_ids) > 1
        else next(iter(spec.eos_ids), None),
    }
    config |= config_of(spec)
    _check_nothing_is_lost(spec, from_hf(config))
    return config


def _check_nothing_is_lost(spec: ModelSpec, back: ModelSpec) -> None:
    """A family has no field for what none of its models does; what it cannot say it must not drop."""
    for name in spec.__struct_fields__:
        ours, theirs = getattr(spec, name), getattr(back, name)
        if name == "query_scale":
            same = math.isclose(spec.scale, back.scale)
        elif name == "windows":
            same = ours == theirs or not any((*ours, *theirs))
        else:
            same = ours == theirs
        if not same:
            raise UnsupportedModel(
                f"a {spec.family} checkpoint cannot say that {name} is {ours!r}",
                hint=f"its config.json would be read as {theirs!r}: choose a family that has this",
            )
