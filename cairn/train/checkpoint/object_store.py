"""A second home for checkpoints, far from the machine: only what has changed travels.

    checkpoints/step-00000100/ --cut at tensors, hash--> objects/ab/abcd...   each content once, for all steps
                                                     `-> steps/step-00000100.json    written last: then it is there

A tensor that did not change since the step before (an embedding that is frozen, a file of settings) has the same hash
and is not sent again. Whatever fsspec can write to is a home: s3://, gs://, file://, memory://. Fetching gives the
folder back byte for byte, so any layout can load it. Knows files and hashes; the cuts come from torch's own metadata.
"""

import hashlib
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from cairn.core.errors import ConfigError, DataError
from cairn.core.events import span
from cairn.train.checkpoint import folder as folders

METADATA = ".metadata"
LARGEST = 64 << 20  # of one object


class Part(msgspec.Struct, frozen=True, array_like=True):
    digest: str
    size: int


class Manifest(msgspec.Struct, frozen=True):
    version: int
    step: int
    files: dict[str, list[Part]]  # name -> its content, in order


class UploadCost(msgspec.Struct, frozen=True):
    """Cost of an upload."""

    step: int
    bytes: int  # of the checkpoint
    new_bytes: int  # that had to travel
    objects: int
    new_objects: int


class ObjectStore:
    def __init__(self, url: str) -> None:
        try:
            import fsspec
        except ImportError:
            raise ConfigError(
                f"{url} needs the package fsspec, which is not installed", hint="pip install fsspec"
            ) from None
        try:
            self.files, self.root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{url} cannot be opened: {error}",
                hint="install what fsspec asks for, or use file:///...",
            ) from None
        self.url, self.root = url, self.root.rstrip("/")

    # -- there --------------------------------------------------------------------------------------

    def send(self, folder: Path) -> UploadCost:
        """Copies a complete checkpoint; objects that are there already are not sent."""
        step = int(folder.name.removeprefix(folders.PREFIX))
        with span("object store", step=step):
            cuts = cuts_of(folder)
            stored = self._known()
            sizes = [0, 0, 0, 0]
            files = {}
            for path in sorted(folder.iterdir()):
                files[path.name] = self._send_file(path, cuts.get(path.name, []), stored, sizes)
            text = msgspec.json.encode(Manifest(1, step, files))
            self._write(f"steps/{folder.name}.json", text)
        return UploadCost(step, *sizes)

    def _send_file(
        self, path: Path, cuts: list[int], stored: set[str], sizes: list[int]
    ) -> list[Part]:
        parts = []
        with path.open("rb") as file:
            for begin, end in _ranges(path.stat().st_size, cuts):
                file.seek(begin)
                data = file.read(end - begin)
                digest = hashlib.blake2b(data, digest_size=20).hexdigest()
                fresh = digest not in stored
                if fresh:
                    self._write(_object(digest), data)
                    stored.add(digest)
                parts.append(Part(digest, len(data)))
                for place, amount in enumerate((len(data), len(data) * fresh, 1, int(fresh))):
                    sizes[place] += amount
        return parts

    def _write(self, name: str, data: bytes) -> None:
        """Under another name first: an object is there whole or not at all, also on a plain file system."""
        target = f"{self.root}/{name}"
        self.files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self.files.pipe_file(f"{target}.part", data)
        self.files.mv(f"{target}.part", target)

    def _known(self) -> set[str]:
        names = self.files.find(f"{self.root}/objects")
        return {name.rpartition("/")[2] for name in names if not name.endswith(".part")}

    # -- and back -----------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        names = (name.rpartition("/")[2] for name in self.files.find(f"{self.root}/steps"))
        plain = (
            n.removeprefix(folders.PREFIX).removesuffix(".json")
            for n in names
            if n.endswith(".json")
        )
        return sorted(int(name) for name in plain if name.isdecimal())

    def fetch(self, step: int, root: Path) -> Path:
        """The checkpoint as a folder under `root`, every byte checked; COMPLETE comes last."""
        manifest = self._manifest(step)
        folder = folders.folder_of(root, step)
        folders.remove(folder)
        folder.mkdir(parents=True)
        for name in sorted(manifest.files, key=lambda name: name == folders.COMPLETE):
            with (folder / name).open("wb") as file:
                for part in manifest.files[name]:
                    file.write(self._read(part, name))
        complaint = folders.complaint(folder)
        if complaint is not None:
            raise DataError(f"step {step} from {self.url}: {complaint}", hint="use an older step")
        return folder

    def keep_newest(self, count: int) -> int:
        """Removes older steps and the objects that none of the kept ones uses; how many objects went."""
        steps = self.steps()
        for step in steps[:-count]:
            self.files.rm_file(self._name(step))
        used = {
            part.digest
            for step in steps[-count:]
            for parts in self._manifest(step).files.values()
            for part in parts
        }
        unused = self._known() - used
        for digest in unused:
            self.files.rm_file(f"{self.root}/{_object(digest)}")
        return len(unused)

    def _manifest(self, step: int) -> Manifest:
        try:
            return msgspec.json.decode(self.files.cat_file(self._name(step)), type=Manifest)
        except FileNotFoundError:
            raise DataError(
                f"{self.url} has no step {step}", hint=f"it has: {self.steps() or 'none'}"
            ) from None
        except msgspec.DecodeError as error:
            raise DataError(
                f"{self._name(step)} is damaged: {error}", hint="use an older step"
            ) from None

    def _read(self, part: Part, name: str) -> bytes:
        try:
            data = self.files.cat_file(f"{self.root}/{_object(part.digest)}")
        except FileNotFoundError:
            raise DataError(
                f"{self.url}: an object of {name} is missing ({part.digest})",
                hint="use an older step",
            ) from None
        if hashlib.blake2b(data, digest_size=20).hexdigest() != part.digest:
            raise DataError(
                f"{self.url}: an object of {name} is damaged ({part.digest})",
                hint="use an older step",
            )
        return data

    def _name(self, step: int) -> str:
        return f"{self.root}/steps/{folders.PREFIX}{step:08d}.json"


def cuts_of(folder: Path) -> dict[str, list[int]]:
    """File -> where its tensors begin, by torch's metadata; without it files are cut by size alone."""
    path = folder / METADATA
    if not path.exists():
        return {}
    metadata: Any = pickle.loads(path.read_bytes())  # our own file, and COMPLETE has its checksum
    cuts: dict[str, list[int]] = {}
    for info in metadata.storage_data.values():
        cuts.setdefault(info.relative_path, []).append(info.offset)
    return cuts


def _ranges(size: int, cuts: list[int]) -> list[tuple[int, int]]:
    edges = sorted({0, size, *(cut for cut in cuts if 0 < cut < size)})
    return [
        (begin, min(begin + LARGEST, end))
        for first, end in pairwise(edges)
        for begin in range(first, end, LARGEST)
    ]


def _object(digest: str) -> str:
    return f"objects/{digest[:2]}/{digest}"
