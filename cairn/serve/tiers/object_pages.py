"""Pages in an object store (s3://, gs://, whatever fsspec writes to): one object for each, named by what it holds.

    URL/<model>/<key>.<parent>        [ checksum | page ]

A key has one parent, so equal pages have one name, whichever server writes them. One listing at the start finds what
this server or others have left; how long such a page takes to compute is not known, and taken to be as long as it takes
to read. Objects that others write later are not seen before the next start. Several servers of one model may share a
store: an object that was deleted meanwhile is computed again. Each keeps to its own room; what no server of now has
found room for is never deleted here, so the store wants a lifecycle rule. Has the methods of `disk_segments`, and
believes nothing either: a length or a checksum that does not fit is a damaged page.
"""

import hashlib
import os
import re
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from threading import Lock

import numpy as np

from cairn.core.errors import ConfigError
from cairn.serve.tiers.disk_segments import Damaged, Filled, Header, Unreachable, too_small

CHECKSUM_BYTES = 4
TRIES = 3
_NAME = re.compile(r"((?:[0-9a-f]{2})+)\.((?:[0-9a-f]{2})*)")
LOCAL = {"file", "local"}  # where folders have to be made; a store of buckets would make a bucket


class ObjectPages:
    def __init__(self, url: str, capacity: int, page_bytes: int, model: str) -> None:
        """`model`: what the pages belong to, as `fingerprint` has it."""
        self.model, self.page_bytes, self.slots = model, page_bytes, capacity // page_bytes
        if self.slots < 1:
            raise too_small(capacity, page_bytes)
        try:
            import fsspec

            self._files, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"kv_offload_disk is {url}, and cannot be opened: {error}",
                hint="install what it asks for (pip install fsspec s3fs), or name a folder",
            ) from None
        self.folder = f"{root.rstrip('/')}/{hashlib.sha256(model.encode()).hexdigest()[:16]}"
        self._names: dict[int, str] = {}  # by slot
        self._users = Counter[str]()  # by name: slots that have it or are getting it
        self._changing = Lock()  # of both: several threads write
        self.latency_s = self._page_s = 0.0  # of the smallest read, and of a page

    def measure(self) -> float:
        """Bytes per second of pages; how long the smallest read takes is left in `latency_s`."""
        name = f"{self.folder}/probe-{os.urandom(8).hex()}"  # others may measure at the same time
        try:
            protocol = self._files.protocol
            if LOCAL & ({protocol} if isinstance(protocol, str) else set(protocol)):
                self._files.makedirs(self.folder, exist_ok=True)
            self._files.pipe_file(name, bytes(self.page_bytes))
            small = min(self._timed(name, 1) for _ in range(TRIES))
            whole = min(self._timed(name, self.page_bytes) for _ in range(TRIES))
            self._files.rm_file(name)
        except Exception as error:  # noqa: BLE001 (of whichever library speaks to the store)
            raise ConfigError(
                f"kv_offload_disk: {self.folder} cannot be written and read: {error}",
                hint="check the address and the rights there",
            ) from None
        self.latency_s, self._page_s = small, max(whole, 1e-9)
        return self.page_bytes / self._page_s  # each page is a request of its own

    def _timed(self, name: str, size: int) -> float:
        began = time.perf_counter()
        self._files.cat_file(name, start=0, end=size)
        return time.perf_counter() - began

    def filled(self) -> Iterator[Filled]:
        """Stored blocks at startup, as far as there are slots."""
        names = sorted(self._files.find(self.folder)) if self._files.exists(self.folder) else []
        matches = [match for name in names if (match := _NAME.fullmatch(name.rpartition("/")[2]))]
        self._names = {slot: match[0] for slot, match in enumerate(matches[: self.slots])}
        self._users = Counter(self._names.values())
        for slot, match in enumerate(matches[: self.slots]):
            key, parent = bytes.fromhex(match[1]), bytes.fromhex(match[2])
            yield Filled(slot, Header(self.model, key, parent, self._page_s, 0))

    def write(
        self, slot: int, key: bytes, parent: bytes, seconds: float, page_B: np.ndarray
    ) -> None:
        """An object is there whole or not at all; what the slot held before is deleted after that."""
        name = f"{key.hex()}.{parent.hex()}"
        checksum = zlib.crc32(page_B.data).to_bytes(CHECKSUM_BYTES, "little")
        with self._changing:
            self._users[name] += 1  # already: the slot that has it now may be given to another page
        try:
            self._files.pipe_file(f"{self.folder}/{name}", checksum + page_B.tobytes())
        except BaseException:
            with self._changing:
                self._users[name] -= 1  # kept, even at 0: `clear` deletes what may be there
            raise
        with self._changing:  # also while it is deleted: it may not be written in between
            before = self._names.get(slot)
            self._names[slot] = name
            if before is not None:
                self._users[before] -= 1
                if not self._users[before]:
                    del self._users[before]
                    self._delete(before)

    def read(self, slot: int, key: bytes, into_B: np.ndarray) -> None:
        """Damaged: it is not there any more. Unreachable: it may be there later."""
        name = self._names.get(slot, "")
        if not name.startswith(f"{key.hex()}."):
            raise Damaged("it holds another page")
        try:
            data = self._files.cat_file(f"{self.folder}/{name}")
        except FileNotFoundError as error:
            raise Damaged(f"it was deleted: {error}") from None
        except Exception as error:  # noqa: BLE001 (of whichever library speaks to the store)
            raise Unreachable(f"{type(error).__name__}: {error}") from None
        if len(data) != CHECKSUM_BYTES + self.page_bytes:
            raise Damaged(f"it has {len(data) - CHECKSUM_BYTES} of {self.page_bytes} bytes")
        page_B = np.frombuffer(data, np.uint8, offset=CHECKSUM_BYTES)
        if zlib.crc32(page_B.data) != int.from_bytes(data[:CHECKSUM_BYTES], "little"):
            raise Damaged("its checksum is another")
        into_B[:] = page_B

    def clear(self) -> None:
        """Delete every page that this server knows of, many in a request. An OSError: some are left."""
        names = [f"{self.folder}/{name}" for name in self._users]
        try:
            if names:
                self._files.rm(names)
        except FileNotFoundError:  # another server was faster: not every store passes over that
            for name in self._users:
                self._delete(name)
        except Exception as error:  # of whichever library speaks to the store
            raise OSError(f"{type(error).__name__}: {error}") from error
        with self._changing:
            self._names.clear()
            self._users.clear()

    def close(self) -> None:
        """There is nothing to close."""

    def _delete(self, name: str) -> None:
        try:
            self._files.rm_file(f"{self.folder}/{name}")
        except FileNotFoundError:  # another server was faster
            return
