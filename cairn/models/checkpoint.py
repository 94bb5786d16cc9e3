"""A model on disk, whatever its format: its spec, its tensors, its tokenizer.

    checkpoint = open_checkpoint(resolve("Qwen/Qwen3-0.6B"))
    model = checkpoint.load(device="cuda")
    tokenizer = checkpoint.tokenizer()

A folder in Hugging Face's format (config.json, safetensors, tokenizer.json) or one GGUF file, which is made to look
like one. Opening reads headers only.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from cairn.core.errors import HardwareError, ModelNotFound, WeightsError
from cairn.models.build import ModelBuild
from cairn.models.checkpoint_names import LEFTOVERS
from cairn.models.config_fields import Fields
from cairn.models.families import from_hf
from cairn.models.family_fields import eos_ids_of
from cairn.models.gguf.tokenizer import tokenizer_from_metadata
from cairn.models.quantized.scheme import CONFIG, GGUF, quantization_of
from cairn.models.quantized.source import QuantizedTensors
from cairn.models.safetensors_file import SafetensorsFolder, TensorSource, read_json
from cairn.models.sampling_defaults import gguf_generation
from cairn.models.shards import ALONE, Shards
from cairn.models.spec import ModelSpec
from cairn.models.stacked_experts import split_experts
from cairn.models.tokenizer import Tokenizer
from cairn.models.tokenizer_folder import tokenizer_from_folder
from cairn.models.transformer import Transformer
from cairn.models.vision.families import has_vision, split_config
from cairn.models.vision.load import PartOfCheckpoint, load_tower
from cairn.models.vision.preprocessor_config import read_rules, read_video_rules
from cairn.models.vision.spec import VisionSpec
from cairn.models.vision.tiling_rules import ImageRules
from cairn.models.vision.tower import Tower
from cairn.models.weights import Progress, load_model

FLOAT_DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}
IN_LAYER = re.compile(r"\.\d+\.")  # names of tensors that a layer has
HEAD = "lm_head.weight"


class Checkpoint:
    def __init__(
        self, path: Path, config: dict[str, Any], tensors: TensorSource, eos_ids: Sequence[int]
    ) -> None:
        self.path = path
        self.generation: dict[
            str, Any
        ] = {}  # generation_config.json, or what a GGUF file says in its place
        self.metadata: Callable[[], Mapping[str, object]] | None = None  # of a GGUF file
        self.vision: VisionSpec | None = None  # of a model that sees
        self.whole: TensorSource = tensors  # with the tower's tensors, where there is one
        if has_vision(config):
            config, self.vision = split_config(config)
            tensors = PartOfCheckpoint(tensors, "text")
            if HEAD in tensors.names():
                config["tie_word_embeddings"] = False
        self.config = config
        self.spec: ModelSpec = from_hf(config)
        if self.vision is not None and self.vision.tower.deep_layers:
            deep = len(self.vision.tower.deep_layers)
            self.spec = msgspec.structs.replace(self.spec, deep_rows=deep)
        self.quantization = quantization_of(config)
        tensors = split_experts(tensors, self.spec.family)
        self.tensors: TensorSource = tensors
        if self.quantization is not None:
            self.tensors = QuantizedTensors(tensors, self.quantization, _float_dtype(config))
        self.eos_ids = tuple(eos_ids) or self.spec.eos_ids

    def tokenizer(self) -> Tokenizer:
        if self.metadata is not None:
            return tokenizer_from_metadata(self.metadata(), str(self.path))
        return tokenizer_from_folder(self.path)

    def stored_dtype(self) -> torch.dtype:
        """The type most of the weights are stored in, or dequantised to: that of the largest tensor."""
        largest = max(self._weights(), key=lambda name: _size(self.tensors.shape(name)))
        dtype = self.tensors.dtype(largest)
        if not dtype.is_floating_point:
            raise WeightsError(
                f"{self.path}: tensor {largest} is stored as {dtype}",
                hint="config.json has no quantization_config that says what it means",
            )
        return dtype

    def quantised(self) -> bool:
        """Return whether the weights are stored in fewer bits than the model computes with."""
        return self.method() is not None

    def method(self) -> str | None:
        """Quantization method as named by `--quantization`; None for floating point."""
        if self.quantization is not None:
            return self.quantization.method
        return GGUF if self.path.is_file() else None

    def stored_form(self) -> str:
        """Common name of the prevailing storage format: Q4_K, gptq, BF16."""
        if self.quantization is not None:
            return self.quantization.method
        if (common := getattr(self.whole, "common_type", None)) is not None:
            return common()
        name = str(self.stored_dtype()).removeprefix("torch.")
        return name.replace("bfloat", "bf").replace("float", "f").upper()

    def cache_scales(self) -> list[tuple[float, float]] | None:
        """Scales of an 8-bit KV cache for each layer; None if the checkpoint has none."""
        if not isinstance(self.tensors, QuantizedTensors):
            return None
        return self.tensors.cache_scales(self.spec.layers)

    def stored_bits(self) -> float:
        """Bits of a weight in the file, scales included: the most that a matrix of a layer has."""
        matrices = filter(IN_LAYER.search, self._matrices())
        return max(map(self._bits, matrices), default=32.0)

    def head_bits(self) -> float:
        """The same of the output projection, which many quantised checkpoints leave in floating point."""
        outside = [name for name in self._matrices() if not IN_LAYER.search(name)]
        heads = [HEAD] if HEAD in outside else outside  # without one, the embedding is the head
        return max(map(self._bits, heads), default=32.0)

    def _matrices(self) -> list[str]:
        return [name for name in self._weights() if len(self.tensors.shape(name)) > 1]

    def stored_bytes(self) -> int:
        """Bytes of all weights in the file."""
        weights = self._weights()
        return int(sum(_size(self.tensors.shape(name)) * self._bits(name) / 8 for name in weights))

    def nbytes(self) -> int:
        """Bytes of all weights in the type that they are stored in, or dequantised to."""
        return sum(
            _size(self.tensors.shape(name)) * self.tensors.dtype(name).itemsize
            for name in self._weights()
        )

    def _bits(self, name: str) -> float:
        bits = getattr(self.tensors, "bits", None)  # of a format that can quantise
        return 8.0 * self.tensors.dtype(name).itemsize if bits is None else bits(name)

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
        notes: list[str] | None = None,
    ) -> Transformer:
        """The model on a device; by default in the stored type, fused wherever that pays.

        `notes`: quantised matrices stay as they are stored, and what does not is said there. None: all are
        dequantised.
        """
        check_device(device)
        fused = torch.device(device).type == "cuda" if fused is None else fused
        build = ModelBuild(device, dtype or self.stored_dtype(), shards, fused)
        return load_model(self.spec, self.tensors, build, progress, notes).eval()

    def load_tower(self, device: str, dtype: torch.dtype) -> Tower | None:
        """The part that reads pictures; None: there is none."""
        if self.vision is None:
            return None
        return load_tower(self.vision, self.whole, ModelBuild(device, dtype))

    def image_rules(self) -> ImageRules | None:
        """Image preprocessing rules."""
        return None if self.vision is None else read_rules(self.path, self.vision)

    def video_rules(self) -> ImageRules | None:
        """Preprocessing rules of video frames; None without video support."""
        rules = self.image_rules()
        return (
            None
            if rules is None or self.vision is None
            else read_video_rules(self.path, self.vision, rules)
        )


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
    beside = path / "hf_quant_config.json"  # where ModelOpt says it
    if CONFIG not in config and beside.is_file():
        config[CONFIG] = {"quant_method": "modelopt", **read_json(beside)}
    generation = path / "generation_config.json"
    settings = read_json(generation) if generation.is_file() else {}
    eos_ids = eos_ids_of(Fields(settings, generation.name))
    checkpoint = Checkpoint(path, config, SafetensorsFolder(path), eos_ids)
    checkpoint.generation = settings
    return checkpoint


def check_device(device: str) -> None:
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise HardwareError(
            f"{device!r} is not a device that models run on", hint="use cpu, cuda or cuda:N"
        )
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise HardwareError("no CUDA device is available", hint="use --device cpu")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
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
    checkpoint = Checkpoint(path, file.config(), file, ())
    checkpoint.generation = gguf_generation(file.metadata, str(path))
    checkpoint.metadata = file.take_metadata
    return checkpoint


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if (folder / "adapter_config.json").is_file():
        raise WeightsError(
            f"{folder} is an adapter, which has no weights of its own",
            hint=f"serve it with its model: cairn serve MODEL --lora-modules NAME={folder}; or `cairn adapter merge`",
        )
    raise WeightsError(
        f"{folder} has no config.json" + (f" but {len(files)} GGUF files" if files else ""),
        hint=f"name one of them, such as {files[0]}"
        if files
        else "give a folder in Hugging Face's format or a .gguf file (on the hub: owner/name/file.gguf)",
    )


def _float_dtype(config: dict[str, Any]) -> torch.dtype:
    """Dtype for dequantised matrices: the original dtype of the model."""
    named = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    return FLOAT_DTYPES.get(named, torch.bfloat16)


def _size(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
