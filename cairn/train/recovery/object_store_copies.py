"""Sends every so many checkpoints to an object store, beside the training; one at a time, by rank 0.

    checkpoints/step-00000200 --links--> checkpoints/.sending/step-00000200 --thread--> the store     then the links go

Looks at which checkpoints are complete on disk and has a thread copy the newest (`checkpoint/object_store`). Its files
are linked first: however long the store takes, the disk may make room for newer ones meanwhile. A store that fails
costs a warning, never the run. At the start of a run whose disk is empty the newest far copy that is whole is fetched.
"""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

from cairn.core.errors import CairnError, DataError
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.object_store import ObjectStore

SENDING = ".sending"


class FarCopies:
    def __init__(
        self, url: str, every: int, root: Path, log_line: Callable[[str], None], keep: int = 0
    ) -> None:
        """`keep`: how many steps stay there; 0: all."""
        self.store, self.every, self.root, self.log_line = ObjectStore(url), every, root, log_line
        self.keep = keep
        self.seen = set(folders.complete_steps(root))
        self.count = 0
        self.thread: threading.Thread | None = None
        self.sent = -1  # the newest step that got there
        self.saves = -1  # how many there had been at the last look
        shutil.rmtree(root / SENDING, ignore_errors=True)  # of a life that was ended meanwhile

    def fetch_if_empty(self) -> None:
        """A machine that was replaced has nothing on its disk. What does not come whole gives way to an older one."""
        if folders.complete_steps(self.root):
            return
        reasons = []
        for step in reversed(self._steps()):
            try:
                self.store.fetch(step, self.root)
            except (OSError, DataError) as error:
                reasons.append(f"step {step}: {error}")
                self.log_line(f"warning: passed over {reasons[-1]}")
                folders.remove(folders.folder_of(self.root, step))
                continue
            self.seen.add(step)
            self.sent = step
            self.log_line(f"step {step} was fetched from {self.store.url}")
            return
        if reasons:
            raise DataError(
                f"none of the {len(reasons)} checkpoints in {self.store.url} can be used: {reasons[0]}",
                hint="a run does not begin anew while there are some: name another recovery.object_store for that",
            )

    def _steps(self) -> list[int]:
        """List the stored steps; an unreachable store raises, because the run must not restart from nothing."""
        try:
            return self.store.steps()
        except CairnError:
            raise
        except Exception as error:
            raise DataError(
                f"{self.store.url} does not say which checkpoints it has: {type(error).__name__}: {error}",
                hint='is it reachable from here? recovery.object_store = "" goes on without it',
            ) from error

    def look(self, saves: int | None = None, last: bool = False) -> None:
        """Called after every step; starts a copy when one is due. The `last` one of a run is always due.

        `saves`: completed so far; the folder, on a file system that may be slow, is read only after another one.
        """
        if saves == self.saves or (self.thread is not None and self.thread.is_alive()):
            return
        self.saves = self.saves if saves is None else saves
        complete = folders.complete_steps(self.root)
        fresh = [step for step in complete if step not in self.seen]
        before, self.count = self.count, self.count + len(fresh)
        self.seen.update(fresh)
        newest = max(complete, default=-1)
        due = before // self.every < self.count // self.every
        if (due or (last and self.count)) and newest > self.sent:
            linked = self._linked(folders.folder_of(self.root, newest))
            self.thread = threading.Thread(target=self._send, args=(linked,), name="far copy")
            self.thread.start()

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()

    def _linked(self, folder: Path) -> Path:
        """The same files under another name; the folder itself where the disk knows no links."""
        home = self.root / SENDING / folder.name
        with contextlib.suppress(OSError):
            home.mkdir(parents=True, exist_ok=True)
            for path in folder.iterdir():
                os.link(path, home / path.name)
        if folders.lacks(home) is None:  # it may have been removed meanwhile
            return home
        shutil.rmtree(home, ignore_errors=True)
        return folder

    def _send(self, folder: Path) -> None:
        try:
            self.sent = self.store.send(folder).step
            if self.keep:
                self.store.keep_newest(self.keep)
        except Exception as error:  # noqa: BLE001  of any file system there is; the run goes on
            self.log_line(f"warning: {folder.name} was not copied to {self.store.url}: {error}")
        finally:
            if folder.parent.name == SENDING:
                shutil.rmtree(
                    folder.parent, ignore_errors=True
                )  # one at a time: no other one's is in it
