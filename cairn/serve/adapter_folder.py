"""Adapters in a folder: each subfolder that PEFT or `cairn tune` wrote is served under its own name.

    adapters/legal/adapter_config.json      ->    requests with "model": "legal"
    runs/tales/adapter/adapter_config.json  ->    "model": "tales", the name of the run

The folder is looked at again while the server runs: what is new is loaded, what changed is loaded again, and what is
gone is unloaded. One that cannot be loaded is logged once, and the others are served.
"""

import logging
from pathlib import Path
from typing import Protocol

from cairn.core.errors import CairnError, ConfigError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
OF_RUN = "adapter"  # the folder of a run that has its adapter
log = logging.getLogger("cairn")
Stamp = tuple[int, int]  # time of change and size of the weights


class ServesAdapters(Protocol):
    def load_adapter(self, name: str, folder: str, replace: bool = False) -> object: ...

    def unload_adapter(self, name: str) -> None: ...


class AdapterFolder:
    def __init__(self, folder: Path, serving: ServesAdapters) -> None:
        if not folder.is_dir():
            raise ConfigError(
                f"there is no folder {folder} for adapters",
                hint="--adapters names a folder whose subfolders have adapter_config.json",
            )
        self.folder, self.serving = folder, serving
        self._seen: dict[str, Stamp] = {}  # loaded, or found to be bad
        self._served: set[str] = set()

    def scan(self) -> None:
        """Make what is served agree with the folder. Reads files: not for an event loop."""
        try:
            found = found_in(self.folder)
        except OSError as error:  # what is served stays: a disk may come back
            log.warning("the adapters in %s cannot be listed: %s", self.folder, error.strerror)
            return
        for name in self._served - found.keys():
            self.serving.unload_adapter(name)
            self._served.discard(name)
        self._seen = {name: stamp for name, stamp in self._seen.items() if name in found}
        for name, stamp in found.items():
            if self._seen.get(name) != stamp:
                self._seen[name] = stamp
                self._load(name)

    def _load(self, name: str) -> None:
        path = places_in(self.folder).get(name)
        if path is None:  # gone since it was listed
            return
        try:
            self.serving.load_adapter(name, str(path), replace=name in self._served)
            self._served.add(name)
        except CairnError as error:
            log.warning("the adapter %s is not served: %s", name, error)


def found_in(folder: Path) -> dict[str, Stamp]:
    """Complete adapters in a folder, by name."""
    about = {name: (place / WEIGHTS).stat() for name, place in places_in(folder).items()}
    return {name: (one.st_mtime_ns, one.st_size) for name, one in about.items()}


def places_in(folder: Path) -> dict[str, Path]:
    """A folder that is an adapter itself, or adapters and runs with adapters in it; each has its folder's name."""
    inside = [folder] if _is_adapter(folder) else sorted(folder.iterdir())
    found = {}
    for one in inside:
        place = one / OF_RUN if _is_adapter(one / OF_RUN) else one
        if _is_adapter(place) and not one.name.startswith("."):
            named = place.resolve()
            found[named.parent.name if named.name == OF_RUN else named.name] = place
    return found


def _is_adapter(place: Path) -> bool:
    return (place / CONFIG).is_file() and (place / WEIGHTS).is_file()


def read_module(text: str) -> tuple[str, str]:
    """`name=path` of --lora-modules."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"lora_modules has {text!r}", hint="write NAME=PATH")
    return name, path
