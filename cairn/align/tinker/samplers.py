"""Weights that sampling sessions were made with: the latest in memory, the others in files until they are asked for.

A training loop makes a session after every step, and no client ever says that it needs one no more: they go with the
client's own session.
"""

import threading
from collections import OrderedDict
from pathlib import Path

from safetensors.torch import load_file

from cairn.align.tinker.shared_base import Weights
from cairn.core.errors import RequestError
from cairn.models.safetensors_file import write_tensors

HELD = 4  # in memory


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
