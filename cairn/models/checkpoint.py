"""A model on disk, whatever its format: its spec, its tensors, its tokenizer.

    checkpoint = open_checkpoint(resolve("Qwen/Qwen3-0.6B"))
    model = checkpoint.load(device="cuda")
    tokenizer = checkpoint.tokenizer()

A folder in Hugging Face's format (config.json, safetensors, tokenizer.json) or one GGUF file, which is made to look
like one. Opening reads headers only.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cairn.core.errors import HardwareError, ModelNotFound, WeightsError
from cairn.models.families import from_hf
from cairn.models.layers import Build
from cairn.models.safetensors_file import SafetensorsFolder, TensorSource, read_json
from cairn.models.shards import ALONE, Shards
from cairn.models.spec import ModelSpec
from cairn.models.tokenizer import Tokenizer
from cairn.models.transformer import Transformer
from cairn.models.weights import Progress, load_model


class Checkpoint:
    def __init__(
        self, path: Path, config: dict[str, Any], tensors: TensorSource, eos_ids: Sequence[int]
    ) -> None:
        self.path, self.config, self.tensors = path, config, tensors
        self.spec: ModelSpec = from_hf(config)
        self.eos_ids = tuple(eos_ids) or self.spec.eos_ids

    def tokenizer(self) -> Tokenizer:
        if self.path.is_file():
            return Tokenizer.from_gguf(self.path)
        return Tokenizer.from_folder(self.path)

    def stored_dtype(self) -> torch.dtype:
        """The type most of the weights are stored in: that of the largest tensor."""
        largest = max(self.tensors.names(), key=lambda name: _size(self.tensors.shape(name)))
        return self.tensors.dtype(largest)

    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        names = self.tensors.names()
        return sum(_size(self.tensors.shape(n)) * self.tensors.dtype(n).itemsize for n in names)

    def load(
        self,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        *,
        shards: Shards = ALONE,
        fused: bool | None = None,
        progress: Progress = lambda done: None,
    ) -> Transformer:
        """The model on a device; by default in the stored type, fused wherever that pays."""
        check_device(device)
        fused = torch.device(device).type == "cuda" if fused is None else fused
        build = Build(device, dtype or self.stored_dtype(), shards, fused)
        return load_model(self.spec, self.tensors, build, progress).eval()


def open_checkpoint(path: Path) -> Checkpoint:
    if not path.exists():
        raise ModelNotFound(f"{path} does not exist", hint="check the spelling of the path")
    if path.is_dir() and not (path / "config.json").is_file():
        path = _only_gguf(path)
    if path.is_file():
        return _open_gguf(path)
    config = read_json(path / "config.json")
    generation = path / "generation_config.json"
    eos = read_json(generation).get("eos_token_id") if generation.is_file() else None
    eos_ids = [eos] if isinstance(eos, int) else eos or []
    return Checkpoint(path, config, SafetensorsFolder(path), eos_ids)


def check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise HardwareError(f"{device!r} is not a device", hint="use cpu, cuda or cuda:N") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise HardwareError("no CUDA device is available", hint="use --device cpu")


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _open_gguf(path: Path) -> Checkpoint:
    # Imported late: the gguf package is needed for GGUF files only.
    from cairn.models.gguf_file import GGUFFile

    file = GGUFFile(path)
    return Checkpoint(path, file.config(), file, ())


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    raise WeightsError(
        f"{folder} has no config.json" + (f" but {len(files)} GGUF files" if files else ""),
        hint=f"name one of them, such as {files[0]}"
        if files
        else "give a folder in Hugging Face's format or a .gguf file",
    )


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
