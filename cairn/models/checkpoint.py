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
from cairn.models.build import Build
from cairn.models.checkpoint_names import LEFTOVERS
from cairn.models.config_fields import Fields
from cairn.models.families import eos_ids_of, from_hf
from cairn.models.gguf.tokenizer import tokenizer_from_gguf
from cairn.models.safetensors_file import SafetensorsFolder, TensorSource, read_json
from cairn.models.shards import ALONE, Shards
from cairn.models.spec import ModelSpec
from cairn.models.tokenizer import Tokenizer
from cairn.models.tokenizer_folder import tokenizer_from_folder
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
            return tokenizer_from_gguf(self.path)
        return tokenizer_from_folder(self.path)

    def stored_dtype(self) -> torch.dtype:
        """The type most of the weights are stored in: that of the largest tensor."""
        largest = max(self._weights(), key=lambda name: _size(self.tensors.shape(name)))
        return self.tensors.dtype(largest)

    def stored_bits(self) -> float:
        """Bits of a weight in the file, scales included: the most that a matrix has."""
        bits = getattr(self.tensors, "bits", None)  # of a format that can quantise
        sizes = [self.tensors.dtype(name).itemsize * 8.0 if bits is None else bits(name)
                 for name in self._weights() if len(self.tensors.shape(name)) > 1]  # fmt: skip
        return max(sizes, default=32.0)

    def nbytes(self) -> int:
        """Bytes of all weights as stored."""
        return sum(
            _size(self.tensors.shape(name)) * self.tensors.dtype(name).itemsize
            for name in self._weights()
        )

    def _weights(self) -> list[str]:
        """Tensors less the masks and tables that old checkpoints carry, in types of their own."""
        names = [name for name in self.tensors.names() if not LEFTOVERS.search(name)]
        if not names:
            raise WeightsError(f"{self.path} has no weights", hint="download the checkpoint again")
        return names

    def load(
        self,
        device: str = "cpu",
        dtype: torch.dtype | None = None,
        *,
        shards: Shards = ALONE,
        fused: bool | None = None,
        progress: Progress = lambda done: None,
        packed: bool = False,
    ) -> Transformer:
        """The model on a device; by default in the stored type, fused wherever that pays.

        `packed`: matrices that the device multiplies with as they are stored are not dequantised.
        """
        check_device(device)
        fused = torch.device(device).type == "cuda" if fused is None else fused
        build = Build(device, dtype or self.stored_dtype(), shards, fused)
        return load_model(self.spec, self.tensors, build, progress, packed).eval()


def open_checkpoint(path: Path) -> Checkpoint:
    try:
        return _open(path)
    except PermissionError as error:
        raise WeightsError(
            f"no permission to read {error.filename or path}",
            hint="check the permissions of the file and of its folders",
        ) from None


def _open(path: Path) -> Checkpoint:
    if not path.exists():
        raise ModelNotFound(f"{path} does not exist", hint="check the spelling of the path")
    if path.is_dir() and not (path / "config.json").is_file():
        path = _only_gguf(path)
    if path.is_file():
        return _open_gguf(path)
    config = read_json(path / "config.json")
    generation = path / "generation_config.json"
    settings = read_json(generation) if generation.is_file() else {}
    eos_ids = eos_ids_of(Fields(settings, generation.name))
    return Checkpoint(path, config, SafetensorsFolder(path), eos_ids)


def check_device(device: str) -> None:
    try:
        wanted = torch.device(device)
    except RuntimeError:
        wanted = None
    if wanted is None or wanted.type not in ("cpu", "cuda"):
        raise HardwareError(
            f"{device!r} is not a device that models run on", hint="use cpu, cuda or cuda:N"
        )
    if wanted.type == "cuda" and not torch.cuda.is_available():
        raise HardwareError("no CUDA device is available", hint="use --device cpu")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise HardwareError(
            f"there is no {device}: this machine has {torch.cuda.device_count()} CUDA devices",
            hint="they are counted from cuda:0",
        )


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _open_gguf(path: Path) -> Checkpoint:
    # Imported late: the gguf package is needed for GGUF files only.
    from cairn.models.gguf.file import GGUFFile

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
        else "give a folder in Hugging Face's format or a .gguf file (on the hub: owner/name/file.gguf)",
    )


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
