"""Adapters in a folder: each subfolder that PEFT or `cairn tune` wrote is served under its own name.

    adapters/legal/adapter_config.json      ->    requests with "model": "legal"
    runs/tales/adapter/adapter_config.json  ->    "model": "tales", the name of the run, for --adapters runs,
                                                  runs/tales or runs/tales/adapter

The folder is looked at again while the server runs: what is new is loaded, what changed is loaded again, and what is
gone is unloaded. One that cannot be loaded is logged once, and the others are served.
"""

import logging
from contextlib import suppress
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
        self._without: set[str] = set()  # weights, which was said
        self._is_listed = True

    def scan(self) -> None:
        """Make what is served agree with the folder. Reads files: not for an event loop."""
        try:
            places = places_in(self.folder)
            stamps = {name: _stamp(place) for name, place in places.items()}
            without = {one.name for one in self.folder.iterdir() if _lacks_weights(one)}
        except OSError as error:  # what is served stays: a disk may come back
            if self._is_listed:  # said once, and not at every look
                log.warning("the adapters in %s cannot be listed: %s", self.folder, error.strerror)
            self._is_listed = False
            return
        self._is_listed = True
        for name in sorted(without - self._without):
            log.warning("the adapter %s is not served: it has no %s", name, WEIGHTS)
        self._without = without
        for name in self._served - stamps.keys():
            self._unload(name)
        self._seen = {name: stamp for name, stamp in self._seen.items() if name in stamps}
        for name, stamp in stamps.items():
            if self._seen.get(name) != stamp:
                self._seen[name] = stamp
                self._load(name, places[name])

    def _load(self, name: str, place: Path) -> None:
        try:
            self.serving.load_adapter(name, str(place), replace=name in self._served)
            self._served.add(name)
        except (CairnError, OSError) as error:  # also: gone since it was listed
            log.warning("the adapter %s is not served: %s", name, error)

    def _unload(self, name: str) -> None:
        self._served.discard(name)
        with suppress(CairnError):  # it was unloaded by hand
            self.serving.unload_adapter(name)


def places_in(folder: Path) -> dict[str, Path]:
    """Adapters by name: the folder itself, or the adapters and training runs in it, named by their folders."""
    own = folder.resolve()
    if _is_adapter(folder):
        return {own.parent.name if own.name == OF_RUN else own.name: folder}
    places = {}
    for one in sorted(folder.iterdir()):
        place = one / OF_RUN if _is_adapter(one / OF_RUN) else one
        if _is_adapter(place) and not one.name.startswith("."):
            places[one.name] = place
    if places.keys() == {OF_RUN}:  # the folder is a run
        return {own.name: places[OF_RUN]}
    return places


def _stamp(place: Path) -> Stamp:
    about = (place / WEIGHTS).stat()
    return about.st_mtime_ns, about.st_size


def _is_adapter(place: Path) -> bool:
    return (place / CONFIG).is_file() and (place / WEIGHTS).is_file()


def _lacks_weights(place: Path) -> bool:
    return (place / CONFIG).is_file() and not (place / WEIGHTS).is_file()


def read_module(text: str) -> tuple[str, str]:
    """`name=path` of --lora-modules."""
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise ConfigError(f"lora_modules has {text!r}", hint="write NAME=PATH")
    return name, path
