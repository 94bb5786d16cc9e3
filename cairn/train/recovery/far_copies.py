"""Sends every so many checkpoints to an object store, beside the training; one at a time, by rank 0.

Looks at which checkpoints are complete on disk and has a thread copy the newest (`checkpoint/object_store`). A store
that fails costs a warning, never the run. At the start of a run whose disk is empty the newest far copy is fetched.
"""

import threading
from collections.abc import Callable
from pathlib import Path

from cairn.core.errors import CairnError
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.object_store import ObjectStore


class FarCopies:
    def __init__(self, url: str, every: int, root: Path, say: Callable[[str], None]) -> None:
        self.store, self.every, self.root, self.say = ObjectStore(url), every, root, say
        self.seen = set(folders.complete_steps(root))
        self.count = 0
        self.thread: threading.Thread | None = None

    def fetch_if_empty(self) -> None:
        """A machine that was replaced has nothing on its disk."""
        if folders.complete_steps(self.root):
            return
        steps = self.store.steps()
        if steps:
            self.store.fetch(steps[-1], self.root)
            self.say(f"step {steps[-1]} was fetched from {self.store.url}")

    def look(self) -> None:
        """Called after every step; starts a copy when one is due."""
        if self.thread is not None and self.thread.is_alive():
            return
        fresh = [step for step in folders.complete_steps(self.root) if step not in self.seen]
        if not fresh:
            return
        self.seen.update(fresh)
        self.count += 1
        if self.count % self.every == 0:
            folder = folders.folder_of(self.root, fresh[-1])
            self.thread = threading.Thread(target=self._send, args=(folder,), name="far copy")
            self.thread.start()

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()

    def _send(self, folder: Path) -> None:
        try:
            self.store.send(folder)
        except (OSError, CairnError) as error:
            self.say(f"warning: {folder.name} was not copied to {self.store.url}: {error}")
