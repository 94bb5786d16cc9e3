"""The tensors of a checkpoint folder, by name, as views of the mapped files; and how such a file is written.

One file or many with an index; nothing is read until a tensor is touched. A damaged or incomplete folder is
refused here, before a model is built. What the names mean is not known here.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cairn.core.errors import WeightsError

LFS = b"version https://git-lfs"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,  # scales of quantised matrices, and their levels below
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class TensorSource(Protocol):
    """A checkpoint's tensors under the names of Hugging Face's format, whatever the file format."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> torch.dtype: ...

    def tensor(self, name: str) -> Tensor:
        """The tensor on the CPU; a view of the file if possible."""
        ...


class SafetensorsFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}  # open files; tensors keep their mapping alive themselves
        self._home = self._find()
        if not self._home:
            raise WeightsError(
                f"the checkpoint in {folder} has no tensors", hint="download the checkpoint again"
            )

    def names(self) -> list[str]:
        return list(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(self._home[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        stored = self._file(self._home[name]).get_slice(name).get_dtype()
        if stored not in DTYPES:
            raise WeightsError(
                f"{self.folder / self._home[name]}: tensor {name} is stored as {stored}",
                hint=f"supported types: {', '.join(DTYPES)}",
            )
        return DTYPES[stored]

    def tensor(self, name: str) -> Tensor:
        return self._file(self._home[name]).get_tensor(name)

    def _find(self) -> dict[str, str]:
        """File of each tensor."""
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            return self._from_index(index)
        single = self.folder / "model.safetensors"
        if not single.is_file():
            raise WeightsError(f"no model.safetensors in {self.folder}", hint=self._instead())
        return dict.fromkeys(self._file(single.name).keys(), single.name)

    def _instead(self) -> str:
        """Hint for a folder without model.safetensors."""
        names = sorted(p.name for p in self.folder.iterdir() if p.is_file())
        if any(name.endswith((".bin", ".pt", ".pth")) for name in names):
            return "pickled weights are not read: convert them with transformers' save_pretrained"
        if any(name.endswith(".safetensors") for name in names):
            return "shards are read by model.safetensors.index.json, which is not there: download it, too"
        return f"the folder holds: {', '.join(names[:8]) or 'nothing'}"

    def _from_index(self, index: Path) -> dict[str, str]:
        home = read_json(index).get("weight_map")
        if not isinstance(home, Mapping) or not all(isinstance(v, str) for v in home.values()):
            raise WeightsError(
                f"{index} has no weight_map", hint="it maps each tensor's name to a file"
            )
        for file in sorted(set(home.values())):
            promised = {name for name, where in home.items() if where == file}
            absent = promised - set(self._file(file).keys())
            if absent:
                raise WeightsError(
                    f"{self.folder / file} lacks {len(absent)} tensors that the index promises, "
                    f"such as {min(absent)}",
                    hint="download the shard and the index again",
                )
        return dict(home)

    def _file(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = _open(self.folder / name)
        return self._files[name]


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        if path.exists():  # safetensors also calls a file absent that may not be read
            raise WeightsError(
                f"no permission to read {path}", hint="check the permissions of the file"
            ) from None
        raise WeightsError(
            f"{path} does not exist, but the index names it",
            hint="a shard is missing: download the checkpoint again",
        ) from None
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise WeightsError(
            f"{path} ({size} bytes) cannot be read as safetensors: {' '.join(str(error).split())}",
            hint="it is a pointer of Git LFS: run `git lfs pull` in its folder, or download it"
            if is_lfs_pointer(path)
            else "the file may be truncated: compare its size with the original",
        ) from None


def is_lfs_pointer(path: Path) -> bool:
    """Return whether the file is a Git LFS pointer instead of the content."""
    try:
        with path.open("rb") as file:
            return file.read(len(LFS)) == LFS
    except OSError:
        return False


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a file with the default permissions; a full disk is an OSError as elsewhere."""
    path.touch()
    mode = path.stat().st_mode  # safetensors makes files that only their owner may read
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        path.unlink(missing_ok=True)
        if (number := re.search(r"os error (\d+)", str(error))) is None:
            raise
        raise OSError(int(number[1]), f"cannot write the weights: {error}", str(path)) from None
    path.chmod(mode)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint, or an error that says which file is wrong."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise WeightsError(
            f"cannot read {path}: {error.strerror}", hint="check the path and its permissions"
        ) from None
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"{path} is not valid JSON: {error}", hint="download the file again"
        ) from None
    if not isinstance(content, dict):
        raise WeightsError(
            f"{path} holds a {type(content).__name__}, expected an object",
            hint="download the file again",
        )
    return content
