"""The files of /v1/files in a folder, each for the API key that it was made with.

    FOLDER/files/file-4f9c....json      what it is: FileRecord
    FOLDER/files/file-4f9c....data      its content
    FOLDER/lock                         held by the server that uses the folder

All records are read at the start; a file is looked up in that table, so that no request chooses a path.
"""

import asyncio
import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from cairn.core.errors import ConfigError
from cairn.serve.http.protocol.batches import FileObject
from cairn.serve.http.protocol.refusal import Refusal

R = TypeVar("R", bound=msgspec.Struct)
MOST_BYTES = 16 * 2**30  # of all files together
MOST_FILES = 10_000  # of one key


class FileRecord(msgspec.Struct, kw_only=True):
    holder: str  # of the API key
    file: FileObject


class FileStore:
    """Belongs to the thread of the event loop."""

    def __init__(
        self, folder: Path, clock: Callable[[], float], key_bytes: int = MOST_BYTES
    ) -> None:
        """`key_bytes`: of the files of one key."""
        self._folder, self._clock, self._key_bytes = folder / "files", clock, key_bytes
        self._arriving: dict[str, FileRecord] = {}  # they are being written
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make {self._folder}: {error.strerror}") from None
        self._records = read_records(self._folder, FileRecord, lambda record: record.file.id)

    async def put(self, holder: str, filename: str, purpose: str, content: bytes) -> FileObject:
        self._check_room(holder, len(content))
        file = FileObject(
            id=f"file-{secrets.token_hex(12)}",
            bytes=len(content),
            created_at=int(self._clock()),
            filename=filename,
            purpose=purpose,
        )
        record = self._arriving[file.id] = FileRecord(holder=holder, file=file)
        data = self.data_path(file.id)
        try:
            with kept_on_disk(data, self._folder / f"{file.id}.tmp"):
                await asyncio.to_thread(data.write_bytes, content)
                self._keep(record)
        finally:
            del self._arriving[file.id]
        return file

    def _check_room(self, holder: str, more: int) -> None:
        records = [*self._records.values(), *self._arriving.values()]
        own = [record.file.bytes for record in records if record.holder == holder]
        every = sum(record.file.bytes for record in records)
        for what, stored, most in (
            ("the files of this key have", sum(own) + more, self._key_bytes),
            ("all files have", every + more, MOST_BYTES),
            ("the files of this key are", len(own) + 1, MOST_FILES),
        ):
            if stored > most:
                unit = "" if most == MOST_FILES else " bytes"
                message = f"{what} {stored}{unit} with this one; {most} is the most: delete some"
                raise Refusal(413, message, code="files_full")

    def adopt(self, holder: str, filename: str, path: Path) -> FileObject:
        """A file that was written here becomes one of the holder's, too: a second name for the same bytes, because a
        copy of gigabytes would stop the event loop."""
        file = FileObject(
            id=f"file-{secrets.token_hex(12)}",
            bytes=path.stat().st_size,
            created_at=int(self._clock()),
            filename=filename,
            purpose="batch_output",
        )
        try:
            try:
                os.link(path, self.data_path(file.id))
            except OSError:  # a file system without hard links
                shutil.copyfile(path, self.data_path(file.id))
            self._keep(FileRecord(holder=holder, file=file))
        except OSError:  # a full disk: half of a copy would only make it fuller
            for suffix in ("data", "tmp"):
                (self._folder / f"{file.id}.{suffix}").unlink(missing_ok=True)
            raise
        return file

    def get(self, holder: str, id: str) -> FileObject:
        record = self._records.get(id)
        if record is None or record.holder != holder:
            raise Refusal(404, f"there is no file {id[:80]!r}", param="id", code="file_not_found")
        return record.file

    def of(self, holder: str) -> list[FileObject]:
        """Newest first."""
        files = [record.file for record in self._records.values() if record.holder == holder]
        return sorted(files, key=lambda file: (file.created_at, file.id), reverse=True)

    def data_path(self, id: str) -> Path:
        return self._folder / f"{id}.data"

    def drop(self, holder: str, id: str) -> None:
        self.get(holder, id)
        del self._records[id]
        (self._folder / f"{id}.json").unlink(missing_ok=True)
        self.data_path(id).unlink(missing_ok=True)

    def _keep(self, record: FileRecord) -> None:
        write_record(self._folder / f"{record.file.id}.json", record)
        self._records[record.file.id] = record


def hold_folder(folder: Path) -> Callable[[], None]:
    """Refuses a folder that another server uses: both would run its batches. The call that comes back lets it go."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f"another server runs the batches in {folder}",
            hint="give each server a batch_folder of its own, or wait until that one has ended",
        ) from None
    except OSError:  # a file system that knows no locks is taken as it is
        pass
    return partial(os.close, lock)


@contextmanager
def kept_on_disk(*unfinished: Path) -> Iterator[None]:
    """A full disk is no bug of the server: the client gets an error, and nothing that is `unfinished` stays."""
    try:
        yield
    except OSError as error:
        for path in unfinished:
            path.unlink(missing_ok=True)
        message = f"the server cannot keep this: {(error.strerror or str(error)).lower()}"
        raise Refusal(507, f"{message}; its operator has to make room", code="files_full") from None


def write_record(path: Path, record: msgspec.Struct) -> None:
    """Whole or not at all, whenever the process ends."""
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(msgspec.json.encode(record))
    os.replace(unfinished, path)


def read_records(folder: Path, kind: type[R], key: Callable[[R], str]) -> dict[str, R]:
    records = {}
    for path in sorted(folder.glob("*.json")):
        try:
            record = msgspec.json.decode(path.read_bytes(), type=kind)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ConfigError(f"cannot read {path}: {error}", hint="move it away") from None
        records[key(record)] = record
    return records
