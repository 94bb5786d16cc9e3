"""Weights that sampling sessions were made with: the latest in memory, the others in files until they are asked for.

A training loop makes a session after every step, and no client ever says that it needs one no more: they go with the
client's own session.
"""

import shutil
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors.torch import load_file

from cairn.align.tinker.shared_base import Weights
from cairn.core.errors import ConfigError, RequestError
from cairn.models.safetensors_file import write_tensors
from cairn.train.run_lock import check_free, exclusive_run

HELD = 4  # in memory
SAMPLING = "sampling_sessions"  # the folder of the others, inside that of saved weights


@contextmanager
def own_folder(parent: Path) -> Iterator[Path]:
    """A folder inside `parent` for this process; those of processes that were killed are removed first."""
    for other in parent.iterdir() if parent.is_dir() else ():
        if other.is_file():  # of versions that had one folder for all processes
            other.unlink(missing_ok=True)
            continue
        with suppress(ConfigError):  # another server is inside
            check_free(other)
            shutil.rmtree(other, ignore_errors=True)
    folder = parent / uuid.uuid4().hex[:12]
    folder.mkdir(parents=True)
    try:
        with exclusive_run(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Samplers:
    """Any thread may ask."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._held: OrderedDict[str, Weights] = OrderedDict()  # the one used last is the last
        self._versions: dict[str, int] = {}
        self._lock = threading.Lock()

    def put(self, id: str, weights: Weights) -> None:
        with self._lock:
            self._versions[id] = weights.version
            self._hold(id, weights)

    def get(self, id: str) -> Weights:
        with self._lock:
            if id not in self._versions:
                raise RequestError(
                    f"no sampling session {id!r}", hint="the server was started anew"
                )
            if id not in self._held:
                self._hold(id, Weights(load_file(self._file(id)), self._versions[id]))
            self._held.move_to_end(id)
            return self._held[id]

    def forget(self, session: str) -> None:
        """All that this client has made, with their files."""
        with self._lock:
            for id in [id for id in self._versions if id.startswith(f"{session}-")]:
                del self._versions[id]
                self._held.pop(id, None)
                self._file(id).unlink(missing_ok=True)

    def _hold(self, id: str, weights: Weights) -> None:
        self._held[id] = weights
        while len(self._held) > HELD:
            old, kept = self._held.popitem(last=False)
            if not self._file(old).is_file():
                self.folder.mkdir(parents=True, exist_ok=True)
                tensors = {n: t.cpu().contiguous() for n, t in kept.tensors.items()}
                write_tensors(tensors, self._file(old))

    def _file(self, id: str) -> Path:
        return self.folder / f"{id}.safetensors"
